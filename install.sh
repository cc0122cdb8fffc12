#!/bin/bash
# Install PhOS.
#
#   ./install.sh                     into /usr/local (root)
#   ./install.sh --prefix DIR        into DIR/lib/phos, with links in DIR/bin
#   ./install.sh --dev               and the tools that `make check` and `make test` need; `phos` is then the clone itself
#   ./install.sh --check             say what this machine offers and lacks (phos-gpu doctor)
#   ./install.sh --uninstall         remove what an installation put into the prefix
#   ./install.sh --bundle DIR        make a folder that works on machines without compiler or package registry
#       --for-python 3.12            ... with these Pythons (may be repeated; default 3.10 to 3.13)
#       --omit NAME                  ... without this Python package, which the other machine has (may be repeated)
#   DIR/install.sh --offline         set such a folder up where it was carried to (--python CMD picks the Python)
#
# --python CMD     the Python (3.10 or newer) to make the environment with; default: the system's
# --private-criu   a private CRIU even if the system's is new enough
#
# Running it again repairs and updates. Packages come from apt and pip as this machine has them configured.
set -euo pipefail
umask 022 # what root installs everybody runs

script=$(readlink -f -- "${BASH_SOURCE[0]}")
source=$(dirname "$script")
prefix=/usr/local
mode=install
dev=
bundle=
python_wanted=${PYTHON:-}
private_criu=
pythons=()
omit=()
criu_needed=4.1
arguments=("$@")

usage() { sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p}' "$script"; }
fail() { printf 'install.sh: %s\n' "$@" >&2; exit 1; }
number=0
step() { number=$((number + 1)); printf '%d. %s\n' "$number" "$*"; }
say() { printf '   %s\n' "$*"; }
value() { [ "$#" -ge 2 ] && [ -n "$2" ] && [ "${2#-}" = "$2" ] || fail "$1 wants a value; --help lists the options."; }

while [ "$#" -gt 0 ]; do
    case $1 in
    --prefix) value "$@"; prefix=$2; prefix_given=1; shift ;;
    --prefix=*) prefix=${1#*=}; prefix_given=1 ;;
    --dev) dev=1 ;;
    --check) mode=check ;;
    --uninstall) mode=uninstall ;;
    --offline) mode=offline ;;
    --bundle) value "$@"; mode=bundle bundle=$2; shift ;;
    --bundle=*) mode=bundle bundle=${1#*=} ;;
    --for-python) value "$@"; pythons+=("$2"); shift ;;
    --for-python=*) pythons+=("${1#*=}") ;;
    --omit) value "$@"; omit+=("$2"); shift ;;
    --omit=*) omit+=("${1#*=}") ;;
    --python) value "$@"; python_wanted=$2; shift ;;
    --python=*) python_wanted=${1#*=} ;;
    --private-criu) private_criu=1 ;;
    -h | --help) usage; exit 0 ;;
    *) fail "unknown option $1; --help lists the options." ;;
    esac
    shift
done

# A carried folder holds this script in lib/phos, beside what it sets up.
carried=
if [ -d "$source/wheels" ]; then
    carried=$source
    [ -n "${prefix_given:-}" ] || prefix=$(readlink -f "$source/../..")
    case $mode in
    install) mode=offline ;;
    bundle) fail "this folder is a bundle already; copy it as it is." ;;
    esac
elif [ "$mode" = offline ]; then
    fail "--offline is for folders made by --bundle; this is a clone, which needs apt and pip." \
        "Make one with ./install.sh --bundle DIR on a machine that has them."
fi
[ "$mode" != bundle ] || prefix=$bundle
[ -n "$prefix" ] || fail "the folder to install into has no name; --help lists the options."
prefix=$(readlink -m -- "$prefix")
case $mode in
install | offline)
    # Of a --dev installation the libraries are the clone's.
    for place in "$prefix" ${dev:+"$source"}; do
        case $place in *[\ :\;]*)
            fail "$place has a blank, a colon or a semicolon in its name, which the dynamic linker takes for the end of a" \
                "library's or a folder's (LD_PRELOAD, LD_LIBRARY_PATH): no program could be started under PhOS. Choose another folder." ;;
        esac
    done
    ;;
esac
case $mode in
check | uninstall) [ -d "$prefix" ] || fail "there is no folder $prefix: PhOS is not installed there." ;;
*)
    mkdir -p -- "$prefix" 2>/dev/null && [ -w "$prefix" ] ||
        fail "$prefix cannot be made or written; run as root, or choose another --prefix."
    ;;
esac

# One at a time in folder $1, until this script ends: another one is waited for, and what it did is looked at anew. Where a
# file system has no such locks, they are done without.
lock() {
    local descriptor status=0
    command -v flock >/dev/null && { exec {descriptor}<"$1"; } 2>/dev/null || return 0
    flock -n -E 75 "$descriptor" 2>/dev/null || status=$?
    [ "$status" -eq 75 ] || return 0
    echo "Another install.sh is at work in $1; this one goes on when that has ended."
    flock "$descriptor"
    [ "$1" -ef "/proc/self/fd/$descriptor" ] || exec "$script" "${arguments[@]}"
}
[ "$mode" = check ] || lock "$prefix"

home=$prefix/lib/phos
commands=(criu phos-gpu phosd)
modules=(google.protobuf cuda.bindings click rich psutil xxhash elftools pycriu phos)

# ---- check and uninstall ------------------------------------------------------------------------------------------

# Whether $home is an installation, or the begin of one: what is written there first, or goes last.
installed() {
    local mark
    for mark in bin/layout.sh criu/version criu.path criu.new; do
        [ ! -e "$home/$mark" ] || return 0
    done
    return 1
}

# Nothing of anybody else's is taken for ours, and no clone for what is made of it.
refuse_foreign() {
    [ -e "$home" ] || return 0
    if [ "$home" != "$carried" ]; then
        case $source/ in "$home"/*) fail "$home is, or holds, the clone that this script is in: $1" ;; esac
    fi
    [ ! -e "$home/.git" ] || fail "$home is a clone: $1"
    [ -d "$home" ] && { [ -z "$(ls -A "$home")" ] || installed; } || fail "$home is not of PhOS's making: $1"
}

ours() { [ -L "$1" ] && case $(readlink "$1") in */lib/phos/bin/*) true ;; *) false ;; esac; }

# $home as a unit has it, between quotes.
unit_home() { printf '%s\n' "$home" | sed 's/%/%%/g; s/[\\"]/\\&/g'; }
unit_text() { sed "s|@HOME@|$(unit_home | sed 's/[&|\\]/\\&/g')|" "$source/packaging/phosd.service"; }

if [ "$mode" = check ]; then
    [ -x "$home/bin/phos-gpu" ] || fail "PhOS is not installed in $prefix; run ./install.sh (or name the --prefix)."
    exec "$home/bin/phos-gpu" doctor
fi

if [ "$mode" = uninstall ]; then
    refuse_foreign "nothing was removed."
    found=
    for place in "$home" "$prefix"/{bin,sbin}/{criu,phos-gpu,phosd}; do
        if [ "$place" = "$home" ] && [ -e "$place" ]; then
            folder=$home
        elif ours "$place"; then
            folder=${place%/*}
        else
            continue
        fi
        found=1
        [ -w "$folder" ] || fail "$folder cannot be written, so nothing was removed; run as root, or as who installed it."
    done
    unit=/etc/systemd/system/phosd.service
    if [ -f "$unit" ] && grep -qF "ExecStart=\"$(unit_home)/bin/" "$unit"; then
        found=1
        systemctl disable --now phosd.service >/dev/null 2>&1 || true
        rm -f "$unit"
        systemctl daemon-reload >/dev/null 2>&1 || true
    fi
    for folder in bin sbin; do
        for command in "${commands[@]}"; do
            ! ours "$prefix/$folder/$command" || rm -f "$prefix/$folder/$command"
            # What stood in our place before; another one that has come since stays.
            displaced=$home/displaced/$folder/$command back=$prefix/$folder/$command
            if [ -e "$displaced" ] || [ -L "$displaced" ]; then
                if [ -e "$back" ]; then
                    back=$back.before-phos
                    echo "$prefix/$folder/$command is not ours and stays; the one of before is $back now."
                fi
                mv "$displaced" "$back"
            fi
        done
    done
    [ "$(readlink "$prefix/install.sh" || true)" != lib/phos/install.sh ] || rm -f "$prefix/install.sh"
    [ ! -d "$home" ] || find "$home" -mindepth 1 -maxdepth 1 ! -name bin -exec rm -rf {} + # by bin it is known
    rm -rf "$home"
    [ -n "$found" ] || { echo "PhOS is not installed in $prefix: nothing was removed."; exit 0; }
    # Only if empty: the prefix may be shared, and may not have been ours. /usr/local's folders belong to the system.
    [ "$prefix" = /usr/local ] || rmdir "$prefix/bin" "$prefix/lib" "$prefix" 2>/dev/null || true
    running=$(pgrep -af -- '-m phos.gpu_engine.daemon' 2>/dev/null || true)
    [ -n "$running" ] || rmdir /dev/shm/phos 2>/dev/null || true # of whichever phosd was the last
    echo "PhOS is removed from $prefix. System packages stay."
    running=$(grep -F " $home/venv/" <<<"$running" | cut -d ' ' -f 1 | paste -sd ' ' || true) # not that of another prefix
    [ -z "$running" ] || echo "phosd still runs (process $running): it holds GPU memory of running applications until they end."
    exit 0
fi

refuse_foreign "nothing is installed there; choose another --prefix."

# ---- pieces -------------------------------------------------------------------------------------------------------

[ "$(uname -sm)" = "Linux x86_64" ] || fail "PhOS runs on Linux on x86-64; this is $(uname -sm)."

python_fits() { "$1" -I -c 'import sys; sys.exit(sys.version_info < (3, 10) or sys.implementation.name != "cpython")' 2>/dev/null; }

# The system's Python before whatever PATH has: an environment made with pyenv's or conda's dies with that. For a
# carried folder the other way round: its packages may complete those of the Python that the user works with.
choose_python() {
    local candidate order="/usr/bin/python3 python3"
    [ "$mode" != offline ] || order="python3 /usr/bin/python3"
    for candidate in ${python_wanted:+"$python_wanted"} $order python3.13 python3.12 python3.11 python3.10; do
        if python_fits "$candidate"; then
            # A shim's own address is of no use inside an environment.
            "$candidate" -I -c 'import sys; print(sys.executable)'
            return
        fi
        [ -z "$python_wanted" ] || fail "$python_wanted is not CPython 3.10 or newer."
    done
    return 1
}

# CRIU $1 (a program) is new enough and starts: 3.x does not on Linux 6.13 and later.
criu_serves() {
    local version
    version=$("$1" --version 2>/dev/null | sed -n 's/^Version: //p') || return 1
    [ -n "$version" ] && [ "$(printf '%s\n' "$criu_needed" "$version" | sort -V | head -n 1)" = "$criu_needed" ]
}

system_criu() {
    local folder
    for folder in /usr/local/sbin /usr/sbin /usr/bin /sbin /bin /usr/local/bin "$home"/displaced/{sbin,bin}; do
        if [ -x "$folder/criu" ] && ! ours "$folder/criu"; then
            echo "$folder/criu"
            return
        fi
    done
}

packages_needed() {
    local package keyring=debian-archive-keyring
    # It verifies where the private CRIU comes from. Ubuntu's own is always there.
    if grep -q '^ID=ubuntu' /etc/os-release && [ -z "${PHOS_DEBIAN_MIRROR:-}" ]; then keyring=; fi
    for package in ca-certificates $keyring gcc libc6-dev libprotobuf-c-dev make protobuf-c-compiler protobuf-compiler \
        ${dev:+g++}; do # the tests run the examples' kernels as C++ on the CPU
        dpkg-query -W -f '${Status}\n' "$package" 2>/dev/null | grep -q '^install ok installed$' || echo "$package"
    done
    # The tests have it start containers. Whoever has Docker's own packages has theirs, which Debian's would replace.
    if [ -n "$dev" ] && ! command -v runc >/dev/null; then echo runc; fi
    # Debian splits venv's bootstrap off its Python; only that Python needs it.
    if [ -z "$python_wanted" ] && ! /usr/bin/python3 -I -c 'import venv, ensurepip, sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
        echo python3-venv
    fi
}

install_system_packages() {
    step "System packages"
    if ! command -v apt-get >/dev/null; then
        local tool missing=()
        for tool in gcc make protoc protoc-c python3; do
            command -v "$tool" >/dev/null || missing+=("$tool")
        done
        [ "${#missing[@]}" -eq 0 ] || fail "this system has no apt; install these yourself: ${missing[*]}" \
            "(and the static libprotobuf-c), or carry a bundle here (docs/install.md)."
        say "no apt here; the tools are there"
        return
    fi
    local packages
    mapfile -t packages < <(packages_needed)
    if [ "${#packages[@]}" -eq 0 ]; then
        say "nothing is missing"
        return
    fi
    [ "$(id -u)" -eq 0 ] || fail "these packages are missing, and only root can install them: ${packages[*]}" \
        "Run as root: apt-get install ${packages[*]}"
    say "installing ${packages[*]}"
    local log
    log=$(mktemp)
    # Lists may be absent (fresh container) or outdated (a package is gone from the mirror): read them, then install.
    if ! { apt-get -q update && DEBIAN_FRONTEND=noninteractive apt-get -q -y --no-install-recommends install "${packages[@]}"; } >"$log" 2>&1 </dev/null; then
        tail -n 20 "$log" >&2
        rm -f "$log"
        fail "apt could not install ${packages[*]}."
    fi
    rm -f "$log"
}

install_criu() {
    step "CRIU $criu_needed or newer"
    local system=
    mkdir -p "$home"
    if [ -z "$private_criu" ] && [ "$mode" != bundle ]; then
        system=$(system_criu)
        if [ -n "$system" ] && criu_serves "$system"; then
            local header
            for header in "${system%/*bin/criu}/include/criu" /usr/include/criu /usr/local/include/criu; do
                if [ -r "$header/criu-plugin.h" ] && system_pycriu >/dev/null; then
                    printf '%s\n' "$system" >"$home/criu.path"
                    rm -rf "$home/criu"
                    criu_include=$header
                    say "the system's, $system: $("$system" --version | sed -n 's/^Version: //p')"
                    return
                fi
            done
            say "the system's is new enough, but its plugin header or pycriu is missing"
        elif [ -n "$system" ]; then
            say "the system's ($system) is older than $criu_needed or does not start on this kernel"
        fi
    fi
    rm -f "$home/criu.path"
    criu_include=$home/criu/include
    if [ -s "$home/criu/version" ] && "$home/criu/loader/criu" --library-path "$home/criu/lib" "$home/criu/bin/criu" --version >/dev/null 2>&1; then
        say "private, $(cat "$home/criu/version"), already there"
        return
    fi
    "$source/packaging/fetch-criu" "$home/criu" || fail "no CRIU, no PhOS: see the message above."
}

system_pycriu() {
    local folder
    for folder in /usr/lib/python3/dist-packages /usr/local/lib/python3*/*-packages; do
        if [ -d "$folder/pycriu" ]; then
            echo "$folder"
            return
        fi
    done
    return 1
}

pip() { "$home/venv/bin/python" -I -m pip --disable-pip-version-check -q "$@"; }

# Requirements as pyproject.toml has them: one list. $1...: optional groups.
requirements() {
    "$base_python" -I - "$source/pyproject.toml" "$@" <<'PYTHON'
import re, sys
# tomllib came with 3.11; the three arrays wanted here are plain lists of strings.
text = open(sys.argv[1]).read()
for name in ["dependencies", *sys.argv[2:]]:
    array = re.search(rf"^{name} = \[(.*?)\]$", text, re.S | re.M).group(1)
    for line in re.findall(r'"([^"]+)"', array):
        print(line)
PYTHON
}

# The program behind Python $1, which may be that of an environment.
interpreter() { "$1" -I -c 'import os, sys; print(os.path.realpath(sys._base_executable))'; }

make_environment() {
    step "Python environment"
    local wanted="$home/venv/bin/python"
    # Without --python the environment stays with the Python that it has, as long as that works.
    if ! "$wanted" -I -c 'import pip' 2>/dev/null ||
        { [ -n "$python_wanted" ] && [ "$(interpreter "$wanted")" != "$(interpreter "$base_python")" ]; }; then
        rm -rf "$home/venv"
        "$base_python" -I -m venv "$home/venv" || fail "$base_python could not make a virtual environment."
    fi
    local groups=(examples) list
    [ -z "$dev" ] || groups+=(dev)
    mapfile -t list < <(requirements "${groups[@]}")
    [ "${#list[@]}" -gt 5 ] || fail "pyproject.toml does not say what PhOS needs."
    say "$("$wanted" --version), packages: ${list[*]%%[<>=]*}"
    pip install --prefer-binary "${list[@]}" </dev/null ||
        fail "pip could not install the packages; it uses this machine's own pip configuration."
    install_pycriu
}

install_pycriu() {
    local from=$home/criu/python site
    [ -d "$from" ] || from=$(system_pycriu)
    site=$("$home/venv/bin/python" -I -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    rm -rf "$site/pycriu"
    cp -r "$from/pycriu" "$site/"
}

fetch_cuda_header() {
    step "cuda.h"
    # The types of the newest entry points that frontend/cuda_api.def lists.
    local version=13.5 number=13050 found
    if [ -n "${CUDA_INCLUDE:-}" ]; then
        cuda_include=$CUDA_INCLUDE
        [ -r "$cuda_include/cuda.h" ] || fail "CUDA_INCLUDE=$cuda_include holds no cuda.h."
        found=$(sed -n 's/^#define CUDA_VERSION \([0-9]*\).*/\1/p' "$cuda_include/cuda.h")
        [ "${found:-0}" -ge $number ] ||
            fail "CUDA_INCLUDE=$cuda_include holds the cuda.h of an older CUDA than $version." \
                "Without CUDA_INCLUDE it is fetched by pip; drivers that are older are served all the same."
        say "from $cuda_include, as CUDA_INCLUDE says"
        return
    fi
    cuda_include=$source/build/cuda/include
    if grep -qs "^#define CUDA_VERSION $number\$" "$cuda_include/cuda.h"; then # not what an older clone fetched
        say "already there"
        return
    fi
    local work
    work=$(mktemp -d)
    pip download --no-deps --only-binary :all: --dest "$work" "nvidia-cuda-runtime==$version.*" </dev/null ||
        fail "pip could not fetch the package that holds cuda.h (nvidia-cuda-runtime $version)." \
            "Or name a folder that holds CUDA $version's: CUDA_INCLUDE=/usr/local/cuda/include ./install.sh"
    "$base_python" -I - "$work" "$cuda_include" <<'PYTHON'
import pathlib, sys, zipfile
wheel, target = next(pathlib.Path(sys.argv[1]).glob("*.whl")), pathlib.Path(sys.argv[2])
target.mkdir(parents=True, exist_ok=True)
with zipfile.ZipFile(wheel) as archive:
    for header in ("cudaTypedefs.h", "cuda.h"): # by the last one it is known that they are there
        for name in archive.namelist():
            if name.endswith(f"/include/{header}"):
                part = target / f"{header}.new"
                part.write_bytes(archive.read(name))
                part.replace(target / header)
PYTHON
    rm -rf "$work"
    [ -r "$cuda_include/cuda.h" ] || fail "the package nvidia-cuda-runtime holds no cuda.h where it used to be."
    say "from nvidia-cuda-runtime $version"
}

build_native() {
    step "Building the libraries"
    local log
    log=$(mktemp)
    if ! make -C "$source" -j "$(nproc)" build BUILD=build PYTHON="$base_python" CUDA_INCLUDE="$cuda_include" CRIU_INCLUDE="$criu_include" >"$log" 2>&1; then
        grep -vE '^(gcc|cc|make) ' "$log" | tail -n 30 >&2
        rm -f "$log"
        fail "building failed; the messages are above."
    fi
    rm -f "$log"
    say "libphos.so, the software GPU, the CRIU plugin"
}

# Replace the file or folder $2 by $1 such that a process that has the old one mapped keeps it.
put() {
    rm -rf "$2.new"
    mkdir -p "$(dirname "$2")"
    cp -rL "$1" "$2.new"
    if [ -d "$2" ]; then rm -rf "$2"; fi
    mv -T "$2.new" "$2"
}

put_link() {
    mkdir -p "$(dirname "$2")"
    rm -rf "$2"
    ln -s "$1" "$2"
}

install_files() {
    step "Installing into $prefix"
    local file
    for file in criu phos-gpu phosd layout.sh supervise.py take.py; do
        put "$source/packaging/$file" "$home/bin/$file"
    done
    # For developers links, so that `make build` is all it takes to try a change.
    local place=put
    [ -z "$dev" ] || [ "$mode" = bundle ] || place=put_link
    $place "$source/build/lib/libphos.so" "$home/lib/libphos.so"
    $place "$source/build/lib/libphos_chunks.so" "$home/lib/libphos_chunks.so"
    $place "$source/build/lib/phos_lazy_fill.so" "$home/lib/phos_lazy_fill.so"
    $place "$source/build/lib/phos-can-fill" "$home/lib/phos-can-fill"
    put "$source/include/phos.h" "$home/include/phos.h"
    put "$source/phos/__init__.py" "$home/sdk/phos/__init__.py"
    $place "$source/build/softgpu/libcuda.so.1" "$home/softgpu/libcuda.so.1"
    ln -sf libcuda.so.1 "$home/softgpu/libcuda.so"
    # CRIU loads every library of this folder, and the first plugin that answers a hook ends the chain: ours alone.
    rm -rf "$home/plugin"
    $place "$source/build/plugin/phos_plugin.so" "$home/plugin/phos_plugin.so"
    local folder
    for folder in examples bench; do
        $place "$source/$folder" "$home/$folder"
        [ -L "$home/$folder" ] || find "$home/$folder" -name __pycache__ -prune -exec rm -rf {} +
    done
    # Programs of the tests that benchmarks run; those of a link find the clone's.
    rm -rf "$home/tests"
    for folder in tests/gpu/programs tests/integration/programs; do
        [ ! -L "$home/bench" ] || continue
        put "$source/$folder" "$home/$folder"
        find "$home/$folder" -name __pycache__ -prune -exec rm -rf {} +
    done
    # The lists of entry points, by which a benchmark finds the frontend's hooks.
    local list
    for list in cuda_api.def library_api.def gen_api.py gen_library.py own_code.py; do
        put "$source/frontend/$list" "$home/frontend/$list"
    done
    # What a bundle that was set up here would set itself up with again: its release beside this one's libraries.
    if [ "$mode" = install ]; then
        rm -rf "$home/wheels" "$home/packaging" "$home/install.sh"
        [ "$(readlink "$prefix/install.sh" || true)" != lib/phos/install.sh ] || rm -f "$prefix/install.sh"
    fi
    # What was measured elsewhere and earlier is the clone's to keep.
    [ -L "$home/bench" ] || rm -rf "$home/bench/results"
    if [ "$mode" != bundle ]; then install_package; fi
    install_commit
    install_links
    install_unit
}

# What it was made of, for benchmarks where there is no history; a developer's installation follows the clone.
install_commit() {
    [ "$source" != "$home" ] || return 0
    rm -f "$home/commit"
    if [ -n "$dev" ] && [ "$mode" != bundle ]; then return 0; fi
    local commit
    # An export in the middle of another repository is none of its commits.
    [ "$(git -C "$source" rev-parse --show-toplevel 2>/dev/null)" = "$source" ] || return 0
    commit=$(git -C "$source" rev-parse HEAD 2>/dev/null) || return 0
    [ -z "$(git -C "$source" status --porcelain --untracked-files=no)" ] || commit="$commit with changes"
    echo "$commit" >"$home/commit"
}

# The Python part: the clone itself for developers, else a wheel's contents.
install_package() {
    local site
    site=$("$home/venv/bin/python" -I -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    if [ -n "$dev" ]; then
        rm -rf "$site/phos" "$site"/phos-*.dist-info
        printf '%s\n' "$source" >"$site/phos-clone.pth"
        # What asks for the package's version asks its metadata.
        local version
        version=$(sed -n 's/^version = "\(.*\)"$/\1/p' "$source/pyproject.toml")
        mkdir -p "$site/phos-$version.dist-info"
        printf 'Metadata-Version: 2.1\nName: phos\nVersion: %s\n' "$version" >"$site/phos-$version.dist-info/METADATA"
        say "the Python package is the clone in $source (--dev)"
        return
    fi
    rm -f "$site/phos-clone.pth"
    local work
    work=$(mktemp -d)
    build_wheel "$work"
    rm -rf "$site/phos" "$site"/phos-*.dist-info
    "$home/venv/bin/python" -I -m zipfile -e "$work"/phos-*.whl "$site"
    rm -rf "$work"
}

# Build the phos wheel into folder $1, from a copy: no build leavings in the clone, none of older builds in the wheel.
build_wheel() {
    local copy
    copy=$(mktemp -d)
    cp -rL "$source/phos" "$copy/phos"
    find "$copy" -name __pycache__ -prune -exec rm -rf {} +
    cp "$source/pyproject.toml" "$copy/"
    if [ -r "$source/README.md" ]; then cp "$source/README.md" "$copy/"; else echo PhOS >"$copy/README.md"; fi
    pip wheel --no-deps --wheel-dir "$1" "$copy" </dev/null || fail "the Python package could not be built."
    rm -rf "$copy"
}

install_links() {
    local command folder
    mkdir -p "$prefix/bin"
    for command in "${commands[@]}"; do
        for folder in bin sbin; do
            local place=$prefix/$folder/$command
            # In sbin only in place of another's: `make install` of CRIU puts it there, ahead of bin in root's PATH.
            [ "$folder" = bin ] || [ -e "$place" ] || [ -L "$place" ] || continue
            if { [ -e "$place" ] || [ -L "$place" ]; } && ! ours "$place"; then
                mkdir -p "$home/displaced/$folder"
                mv "$place" "$home/displaced/$folder/$command"
                if [ -r "$home/criu.path" ] && [ "$(cat "$home/criu.path")" = "$place" ]; then
                    printf '%s\n' "$home/displaced/$folder/$command" >"$home/criu.path"
                fi
                say "$place was there already; it is kept in $home/displaced and comes back with --uninstall"
            fi
            ln -sfn "../lib/phos/bin/$command" "$place"
        done
    done
}

link_script() {
    local place=$prefix/install.sh
    if [ "$(readlink "$place" || true)" != lib/phos/install.sh ] && { [ -e "$place" ] || [ -L "$place" ]; }; then
        say "$place was there already and stays; PhOS's is $home/install.sh"
        return
    fi
    ln -sfn lib/phos/install.sh "$place"
}

install_unit() {
    [ "$mode" != bundle ] && [ -d /run/systemd/system ] && [ -w /etc/systemd/system ] || return 0
    unit_text >/etc/systemd/system/phosd.service
    systemctl daemon-reload >/dev/null 2>&1 || true
    say "phosd.service is there and not enabled: phosd starts when it is needed (systemctl enable --now phosd, if you prefer)"
}

# Whatever the umask under which the clone, the bundle or an earlier installation was made; what we displaced stays as is.
let_everybody_read() {
    (cd "$home" && find . -path ./displaced -prune -o ! -type l -exec chmod a+rX,go-w {} +) 2>/dev/null || true # another's
}

# Who may not write here compiled it at every call; and what root's first call left, a user could not remove again.
compile_python() {
    [ -z "$dev" ] || return 0 # links into the clone
    "$home/venv/bin/python" -I -m compileall -q "$home"/venv/lib/python3*/site-packages "$home"/{bench,examples,frontend,tests} \
        >/dev/null || true # some packages bring files for other versions of Python
}

# Whether others than its owner come to $1 and can run it: not to what is below /root, for example.
open_to_others() {
    local path=$1
    while [ "$path" != / ]; do
        case $(stat -c %A -- "$path") in *[xt]) ;; *) return 1 ;; esac
        path=$(dirname -- "$path")
    done
}

finish() {
    compile_python
    let_everybody_read
    step "Done"
    local base
    base=$(interpreter "$home/venv/bin/python")
    if open_to_others "$home/bin/phos-gpu" && ! open_to_others "$base"; then
        say "$base is not for everybody, so neither are these commands; --python CMD chooses another (/usr/bin/python3)"
    fi
    "$home/bin/criu" --version >/dev/null || fail "the installed criu does not start."
    say "criu $("$home/bin/criu" --version | sed -n 's/^Version: //p'), phos-gpu and phosd are in $prefix/bin"
    case ":$PATH:" in
    *":$prefix/bin:"*)
        local first
        first=$(command -v criu || true)
        [ -z "$first" ] || ours "$first" ||
            say "$first comes before it in PATH: put $prefix/bin first, or its criu will not know --lib phos"
        ;;
    *) say "add it to the PATH:  export PATH=$(printf '%q' "$prefix/bin"):\$PATH" ;;
    esac
    say "phos-gpu doctor says what this machine can do; phos-gpu demo shows it"
}

# ---- a folder to carry ----------------------------------------------------------------------------------------------

collect_wheels() {
    step "Wheels for Python ${pythons[*]}"
    local wheels=$home/wheels groups=() list version name
    [ -z "$dev" ] || groups+=(dev)
    case " ${omit[*]-} " in *" nvidia-cuda-nvrtc "*) ;; *) groups+=(examples) ;; esac
    rm -rf "$wheels"
    mkdir -p "$wheels"
    mapfile -t list < <(requirements "${groups[@]}" | grep -v '^mypy\|^ruff')
    local platforms=() tag
    for tag in manylinux_2_5 manylinux1 manylinux_2_12 manylinux2010 manylinux_2_17 manylinux2014 manylinux_2_24 \
        manylinux_2_27 manylinux_2_28 manylinux_2_31 manylinux_2_34 manylinux_2_35; do
        platforms+=(--platform "${tag}_x86_64")
    done
    for version in "${pythons[@]}"; do
        # pip chooses by the Python that runs it which of a package's conditional requirements hold.
        if [ -n "$dev" ] && [ "$version" = 3.10 ]; then list+=(exceptiongroup tomli typing_extensions); fi
        pip download --only-binary :all: --implementation cp --python-version "$version" "${platforms[@]}" \
            --dest "$wheels" "${list[@]}" </dev/null || fail "pip could not fetch the wheels for Python $version."
    done
    for name in "${omit[@]-}"; do
        [ -z "$name" ] || rm -f "$wheels/${name//-/_}"-*.whl
    done
    build_wheel "$wheels"
    # cuda-bindings carries the sources that its modules were compiled from, more than half of its size. unpack_wheels.py
    # asks for no complete wheel. And pycriu becomes a wheel like the others.
    "$base_python" -I - "$home/criu/python" "$wheels" "$(cat "$home/criu/version")" <<'PYTHON'
import pathlib, sys, zipfile
folder, wheels, version = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
for wheel in wheels.glob("cuda_bindings-*.whl"):
    slim = wheel.with_suffix(".slim")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(slim, "w", zipfile.ZIP_DEFLATED) as new:
        for member in old.infolist():
            if not member.filename.endswith((".cpp", ".pyx", ".pxd", ".pxi")):
                new.writestr(member, old.read(member), zipfile.ZIP_DEFLATED)
    slim.replace(wheel)
with zipfile.ZipFile(wheels / f"pycriu-{version}-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as archive:
    for path in sorted(folder.rglob("*.py")):
        archive.write(path, path.relative_to(folder))
PYTHON
    say "$(find "$wheels" -name '*.whl' | wc -l) wheels, $(du -sh "$wheels" | cut -f1)"
}

# A library must not ask for a C library newer than that of the oldest system we serve.
check_portable() {
    local file newest
    for file in "$home/lib/libphos.so" "$home/lib/libphos_chunks.so" "$home/lib/phos_lazy_fill.so" "$home/lib/phos-can-fill" "$home/softgpu/libcuda.so.1" "$home/plugin/phos_plugin.so"; do
        newest=$({ grep -aoE 'GLIBC_2\.[0-9]+' "$file" || true; } | sort -uV | tail -n 1)
        if [ "$(printf '%s\n' "$newest" GLIBC_2.35 | sort -V | tail -n 1)" != GLIBC_2.35 ]; then
            fail "${file##*/}, built here, needs $newest, and a bundle is for 2.35 and later: make it on an older system."
        fi
    done
}

# ---- main -----------------------------------------------------------------------------------------------------------

case $mode in
install)
    install_system_packages
    base_python=$(choose_python) || fail "no CPython 3.10 or newer was found; install python3, or name one with --python."
    install_criu
    make_environment
    [ "$source" -ef "$prefix" ] || lock "$source" # what comes now is done in the clone, for whatever prefix
    fetch_cuda_header
    build_native
    install_files
    finish
    ;;
bundle)
    [ "${#pythons[@]}" -gt 0 ] || pythons=(3.10 3.11 3.12 3.13)
    install_system_packages
    base_python=$(choose_python) || fail "no CPython 3.10 or newer was found; install python3, or name one with --python."
    install_criu
    # pip's own environment, for the time of the bundling: what the bundle holds is wheels.
    "$base_python" -I -m venv "$home/venv" || fail "$base_python could not make a virtual environment."
    [ "$source" -ef "$prefix" ] || lock "$source" # what comes now is done in the clone, for whatever prefix
    fetch_cuda_header
    build_native
    collect_wheels
    rm -rf "$home/venv"
    install_files
    check_portable
    for file in packaging/unpack_wheels.py packaging/phosd.service; do
        mkdir -p "$home/packaging"
        cp "$source/$file" "$home/packaging/"
    done
    put "$script" "$home/install.sh"
    link_script
    step "Done"
    say "$(du -sh "$prefix" | cut -f1) in $prefix; copy it anywhere and run its install.sh --offline there"
    ;;
offline)
    if [ "$home" != "$carried" ]; then
        step "Copying into $prefix"
        mkdir -p "$home/bin"
        cp --remove-destination "$carried/bin/layout.sh" "$home/bin/" # by that it is known
        # Wheels of another version would be unpacked too, and CRIU loads every library beside the plugin.
        rm -rf "$home/wheels" "$home/plugin"
        # A developer's links lead into his clone; and a process that has a library mapped keeps it as it is.
        find "$home" -maxdepth 1 -type l -delete
        cp -r --remove-destination "$carried/." "$home/"
    fi
    step "Python environment"
    base_python=$(choose_python) || fail "no CPython 3.10 or newer was found; name one with --python."
    rm -rf "$home/venv"
    # Without pip, which needs what Debian splits off.
    "$base_python" -I -m venv --without-pip "$home/venv" || fail "$base_python could not make a virtual environment."
    printf '%s\n' "$base_python" >"$home/venv/base-python"
    say "$("$home/venv/bin/python" --version), from $base_python"
    "$home/venv/bin/python" -I "$home/packaging/unpack_wheels.py" "$home/wheels" "${modules[@]}" || exit 1
    source=$home
    link_script
    install_links
    install_unit
    finish
    ;;
esac
