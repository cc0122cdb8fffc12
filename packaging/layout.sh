# Where things are, for the launchers beside this file; sourced with $self, the launcher's own resolved path.
#
# Installed, everything is found from the launcher's place, so that a prefix can be moved or carried:
#   PREFIX/lib/phos/{bin,plugin,lib,softgpu,criu,venv,examples}, PREFIX/bin with links to the launchers.
# In a clone the launchers are in packaging/ and the rest comes from build/ (and .prefix, where there is one).
here=${self%/*}
case $here in
*/packaging)
    tree=${here%/packaging}
    home=$tree/build
    python=$tree/.prefix/lib/phos/venv/bin/python
    [ -d "$home/criu" ] || home_criu=$tree/.prefix/lib/phos/criu
    ;;
*)
    tree=
    home=${here%/bin}
    python=$home/venv/bin/python
    ;;
esac
plugins=$home/plugin
home_criu=${home_criu:-$home/criu}

# Set $criu (a program) and $loader (how it is started; empty for the system's own).
find_criu() {
    loader='' criu=${PHOS_CRIU:-}
    [ -z "$criu" ] || return 0
    if [ -x "$home_criu/loader/criu" ]; then
        loader=$home_criu/loader/criu criu=$home_criu/bin/criu
        return 0
    fi
    if [ -r "$home/criu.path" ]; then
        read -r criu <"$home/criu.path"
        return 0
    fi
    echo "${0##*/}: no CRIU is installed beside PhOS in $home; run install.sh again." >&2
    return 1
}

# Replace this process by Python, with our packages and none of the caller's Python settings.
exec_python() {
    if [ -n "$tree" ] && { [ -n "${PHOS_PYTHON:-}" ] || [ ! -x "$python" ]; }; then
        PYTHONPATH=$tree${PYTHONPATH:+:$PYTHONPATH} exec "${PHOS_PYTHON:-python3}" "$@"
    fi
    if [ ! -x "$python" ]; then
        if [ -d "$home/wheels" ] && [ ! -e "$home/venv" ]; then
            echo "${0##*/}: this folder was carried here and has no Python environment yet; run $home/install.sh --offline" >&2
        else
            echo "${0##*/}: the Python environment in $home/venv is missing, or its Python is gone or not yours to run; run install.sh again (--python chooses another)." >&2
        fi
        exit 127
    fi
    exec "$python" -I "$@"
}
