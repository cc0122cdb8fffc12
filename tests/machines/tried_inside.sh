#!/bin/bash
# What a new user does, on the machine that this runs on: README's quick start, dump and restore by CRIU's own commands,
# the systemd unit, install.sh again, --uninstall. As root, and only on a machine that may be thrown away: it installs
# into /usr/local and needs a systemd that runs. fresh_machine.sh makes such a machine.
#
# Each step ends with a line "STEP passed|failed SECONDS NAME"; status 0 if all passed. The commands are typed into new
# login shells; whether a program was restored is told by its result alone.
set -uo pipefail

clone=$(readlink -f -- "$(dirname -- "${BASH_SOURCE[0]}")/../..")
work=$(mktemp -d)
prefix=/usr/local
limit=${TRIED_SECONDS:-1500} # for one command; an emulated machine is slow
failed=0

step() { # NAME COMMAND...
    local name=$1 begin=$SECONDS word=passed
    shift
    printf '\n==== %s\n' "$name"
    "$@" || word=failed failed=$((failed + 1))
    printf 'STEP %s %d %s\n' "$word" $((SECONDS - begin)) "$name"
}

login() { # COMMAND LINE, in the folder of the program that is tried
    timeout "$limit" su - root -c "cd $PWD || exit; export PHOS_DEVICE=software; $*" </dev/null
}

within() { # SECONDS COMMAND...: until it succeeds
    local end=$((SECONDS + $1))
    shift
    until "$@"; do
        [ "$SECONDS" -lt "$end" ] || { echo "not within the time: $*" && return 1; }
        sleep 0.5
    done
}

# ---- the program ----------------------------------------------------------------------------------------------------

iterations() { grep -c '^ITERATION' out; }
has_done() { [ "$(iterations)" -ge "$1" ]; }
has_result() { grep -q '^RESULT' out; }
gone() { ! kill -0 "$(cat pid)" 2>/dev/null; }

start() { # NAME SECONDS-AN-ITERATION: in a folder of its own, where what follows finds it
    mkdir -p "$work/$1" && cd "$work/$1" || return 1
    local home=$prefix/lib/phos
    login "setsid phos-gpu run -- $home/venv/bin/python $home/examples/mlp.py --iterations 60 --iteration-seconds $2 \
        </dev/null >out 2>&1 & echo \$! >pid" && within "$limit" has_done 10
}

uninterrupted() {
    start uninterrupted 0 && within "$limit" has_result && grep '^RESULT' out
}

dump() {
    mkdir image && login "criu dump --lib phos -t $(cat pid) -D image/" && within 60 gone || return 1
    echo "dumped after iteration $(iterations)"
    ! has_result && cp out out.dumped
}

same_result() {
    within "$limit" has_result && within 60 gone && [ "$(grep '^RESULT' out)" = "$(grep '^RESULT' ../uninterrupted/out)" ] ||
        { tail -n 5 out && return 1; }
    grep '^RESULT' out
}

restore() { login 'criu restore --lib phos -D image/' && same_result; }

restore_lazily() {
    cp out.dumped out # CRIU wants a file to be as long as it was
    login 'criu lazy-pages -D image/' &
    local pages=$! status=0
    within 120 test -S image/lazy-pages.socket || return 1
    login 'criu restore --lazy-pages --lib phos -D image/' && same_result || status=1
    wait "$pages" && return "$status"
}

inspect() { login 'phos-gpu inspect image/' | tee inspected && grep -q 'Complete *yes' inspected && login 'phos-gpu verify image/'; }

# ---- the unit -------------------------------------------------------------------------------------------------------

main_pid() { systemctl show --property MainPID --value phosd; }
serves() { [ "$(systemctl is-active phosd)" = active ] && phos-gpu status >/dev/null 2>&1; }
serves_anew() { serves && [ "$(main_pid)" != "$1" ]; }
knows() { phos-gpu status | grep -w "$(cat pid)" >/dev/null; } # all of it read: phos-gpu shall not die of a closed pipe
no_phosd() { ! pgrep -f 'phos.gpu_engine.daemon' >/dev/null; }

enable_unit() { login 'systemctl enable --now phosd' && within 120 serves && systemctl --no-pager status phosd; }

under() { # NAME COMMAND...: a program runs while the command is run, computes on, is dumped and restored
    local name=$1 before
    shift
    start "$name" 1 && within 120 knows || return 1
    before=$(iterations)
    "$@" && within "$limit" has_done $((before + 3)) && dump && restore
}

restart() {
    local old
    old=$(main_pid)
    login 'systemctl restart phosd' && within 120 serves_anew "$old" && within 120 knows
}

kill_it() {
    local old
    old=$(main_pid)
    kill -9 "$old" && within 120 serves_anew "$old" && within 120 knows
}

stop() { login 'systemctl stop phosd' && [ "$(systemctl is-active phosd)" = inactive ]; }

stop_on_demand() { login 'phosd --stop' && login 'systemctl start phosd' && within 120 serves; }

boots() { [ "$(systemctl is-enabled phosd)" = enabled ] && [ "$(systemctl show --property NRestarts --value phosd)" -le 2 ]; }

# ---- installing -----------------------------------------------------------------------------------------------------

everything() { find "$prefix" /etc/systemd /run/phos /dev/shm -not -path '*/__pycache__*' -not -name 'phosd.log' 2>/dev/null | sort; }

quick_start() {
    local line
    line=$(sed -n '/^## Quick start/,/^## /{/^\.\/install\.sh/{s/ *#.*//;p;q}}' "$clone/README.md")
    [ -n "$line" ] && echo "# $line" && cd "$clone" && login "$line" | tee "$work/demo" &&
        grep -q '^Both runs end with the same result' "$work/demo"
}

doctor() { login 'phos-gpu doctor' | tee "$work/doctor" && ! grep -q '^missing' "$work/doctor"; }

check() { cd "$clone" && login './install.sh --check'; }

again() {
    everything >"$work/once"
    cd "$clone" && login './install.sh' && everything | diff "$work/once" - && serves
}

uninstall() {
    cd "$clone" && login './install.sh --uninstall' && within 60 no_phosd &&
        everything | grep -v '^/run/phos' | diff "$work/before" - && ! systemctl cat phosd >/dev/null 2>&1
}

cd "$work" || exit 1
. /etc/os-release
echo "$PRETTY_NAME, Linux $(uname -r), systemd $(systemctl --version | sed -n '1s/systemd \([^ ]*\).*/\1/p'), $(python3 --version), commit $(git -c safe.directory="$clone" -C "$clone" rev-parse --short=12 HEAD)"
everything | grep -v '^/run/phos' >"$work/before"

step "README's first command: install and demo" quick_start
step "phos-gpu doctor: nothing is missing" doctor
step "a program, uninterrupted" uninterrupted
step "... started again, half way" start plain 0.5
step "criu dump --lib phos -t PID -D image/" dump
step "phos-gpu inspect image/, phos-gpu verify image/" inspect
step "criu restore --lib phos -D image/: same result" restore
step "criu restore --lazy-pages --lib phos -D image/: same result" restore_lazily
step "systemctl enable --now phosd" enable_unit
step "program, dump and restore under it: same result" under unit true
step "systemctl restart phosd under a program: same result" under restarted restart
step "kill -9 of phosd under a program: systemd restarts it, same result" under killed kill_it
step "systemctl stop phosd under a program: phosd on demand, same result" under stopped stop
step "phosd --stop, systemctl start phosd" stop_on_demand
step "the unit is enabled, and was not restarted in vain" boots
step "./install.sh --check" check
step "./install.sh again: the same files, the unit serves" again
step "program, dump and restore after that: same result" under again true
step "./install.sh --uninstall leaves nothing" uninstall

echo "$([ "$failed" -eq 0 ] && echo "ALL PASSED" || echo "$failed FAILED") in $SECONDS seconds"
[ "$failed" -eq 0 ]
