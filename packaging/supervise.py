"""Run CRIU as a child, then wait for the GPU's part of the image (dump) or of the process (restore -d).

    supervise.py dump|restore IMAGE_FOLDER PHOSD CRIU [ARGUMENT...]

The child shares this process's terminal, descriptors and process group; signals sent here go on to it, and its end,
by status or by signal, is this process's end. CRIU is started before anything slow is imported: Python reads the
daemon's client while CRIU works.
"""

import os
import signal
import sys

FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def run(command: list[str]) -> tuple[int, object]:
    """Start command, import the client meanwhile, and return (wait status, the client module or why there is none)."""
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and ignoring is inherited
        try:
            os.execvp(command[0], command)
        except OSError as error:
            os.write(2, f"criu: {command[0]} could not be started: {error.strerror}\n".encode())
        os._exit(127)
    for number in FORWARDED:
        signal.signal(number, lambda received, _frame: os.kill(child, received))
    signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
    client: object
    try:
        from phos.gpu_engine.daemon import client
    except Exception as error:  # reported only when the client would be needed
        client = error
    _, status = os.waitpid(child, 0)
    for number in FORWARDED:
        signal.signal(number, signal.SIG_DFL)
    return status, client


def finish(status: int) -> int:
    """Return the exit status that a wait status stands for; die by the signal that ended the child."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        if -code in (signal.SIGQUIT, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS):
            import resource

            resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    return code


def main(argv: list[str]) -> int:
    """See the module's text. Returns CRIU's exit status, or 1 if CRIU succeeded and the GPU's part failed."""
    action, images, phosd, command = argv[1], argv[2], argv[3], argv[4:]
    status, client = run(command)
    if status != 0:
        # Whatever happened, a process that was detached for this dump is brought back by a phosd that lives.
        if os.spawnv(os.P_WAIT, phosd, [phosd, "--ensure"]) != 0:
            sys.stderr.write("criu: phosd is not running and could not be started; run `phosd --ensure`.\n")
        return finish(status)
    if isinstance(client, Exception):
        sys.stderr.write(f"criu: CRIU is done, but the GPU's part cannot be waited for: {client}\n")
        return 1
    sys.argv = ["criu", "wait", images] if action == "dump" else ["criu", "wait", "--restore", images]
    return 0 if client.main() == 0 else 1  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main(sys.argv))
