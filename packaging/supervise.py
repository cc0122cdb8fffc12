"""Run CRIU as a child, then wait for the GPU's part of the image (dump) or of the process (restore -d).

    supervise.py dump|restore IMAGE_FOLDER PHOSD CRIU [ARGUMENT...]

The child shares this process's terminal, descriptors and process group; signals sent here go on to it, and its end,
by status or by signal, is this process's end. CRIU is started before anything slow is imported: Python reads the
daemon's client while CRIU works.

A dump is ended by a signal only at a moment when CRIU traces no process: it works inside the processes that it traces,
and one that it leaves in the middle of that dies of the breakpoint put there. What is sent from a keyboard reaches the
whole process group, so CRIU ignores it and is ended from here.
"""

import os
import signal
import sys
import time

KEYBOARD = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
FILLS = os.environ.pop("PHOS_FILL_PAGES", "")
"""The launcher has the plugin bring the memory of what is restored. For CRIU's environment, and nobody else's."""
FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

END_SECONDS = 10.0
"""How long a process that was killed may take to end: its pid is then free for the next restore."""


def state_of(pid: int) -> str:
    """The letter of a process's state: T stopped, Z ended."""
    with open(f"/proc/{pid}/stat", errors="replace") as stat:
        return stat.read().rpartition(") ")[2][0]


def traces(pid: int) -> bool:
    """Whether process pid traces another."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/status", errors="replace") as status:
                    if f"\nTracerPid:\t{pid}\n" in status.read():
                        return True
            except OSError:
                pass  # it has ended
    return False


def end_untraced(child: int) -> None:
    """Kill the child as soon as it traces no process, or see it end by itself."""
    while True:
        os.kill(child, signal.SIGSTOP)  # between looking and killing it must not begin
        while (state := state_of(child)) not in "TZ":
            time.sleep(0.001)
        if state == "Z":
            return
        if not traces(child):
            os.kill(child, signal.SIGKILL)
            return
        os.kill(child, signal.SIGCONT)
        time.sleep(0.005)


def run(command: list[str], *, gently: bool) -> tuple[int, object]:
    """Start command, import the client meanwhile, and return (wait status, the client module or why there is none).

    ``gently``: a signal ends the command where it traces nobody; the wait status is as if it had had the signal itself.
    """
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and ignoring is inherited
        for number in KEYBOARD if gently else ():
            signal.signal(number, signal.SIG_IGN)
        if FILLS:
            os.environ["PHOS_FILL_PAGES"] = FILLS
        try:
            os.execvp(command[0], command)
        except OSError as error:
            os.write(2, f"criu: {command[0]} could not be started: {error.strerror}\n".encode())
        os._exit(127)
    ended_by = 0

    def forward(received: int, _frame: object) -> None:
        nonlocal ended_by
        if not gently:
            os.kill(child, received)
        elif not ended_by:
            ended_by = received
            end_untraced(child)

    for number in FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
    if not gently:
        adopt_orphans()
    client: object
    try:
        from phos.gpu_engine.daemon import client
    except Exception as error:  # reported only when the client would be needed
        client = error
    _, status = os.waitpid(child, 0)
    for number in FORWARDED:
        signal.signal(number, signal.SIG_DFL)
    if ended_by and os.WIFSIGNALED(status):
        status = ended_by
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


def bring_back(phosd: str) -> None:
    """Whatever happened, a process that was detached for this dump is brought back by a phosd that lives."""
    if os.spawnv(os.P_WAIT, phosd, [phosd, "--ensure"]) != 0:
        sys.stderr.write("criu: phosd is not running and could not be started; run `phosd --ensure`.\n")


def configure() -> str:
    """Take from the configuration file, where there is one, what the environment leaves open. Returns what is wrong."""
    if not os.environ.get("PHOS_CONFIG") and not os.path.exists("/etc/phos/phos.toml"):
        return ""  # the usual case, in which nothing is imported
    try:
        from phos.gpu_engine import configuration

        configuration.fill_environment()
    except Exception as error:
        return str(error)
    return ""


def entries(images: str) -> set[str]:
    """The names in the image directory."""
    try:
        return set(os.listdir(images))
    except OSError:
        return set()


def adopt_orphans() -> None:
    """What CRIU leaves running becomes this process's child: only then can its pids be seen to be free again."""
    import ctypes

    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


def children_of(pid: int) -> list[int]:
    """The children of a process."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as children:
                found += map(int, children.read().split())
    except OSError:
        pass  # it has ended
    return found


def end_restored(restored: list[int]) -> None:
    """Kill what a restore that has failed left behind: children of ours since CRIU has ended, and what is below them.

    phosd does so too, unless it has died, or CRIU has before it named all of them.
    """
    family = list(restored)
    for pid in family:
        family += children_of(pid)
    for pid in family:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    deadline = time.monotonic() + END_SECONDS
    for pid in restored:
        try:
            while not os.waitpid(pid, os.WNOHANG)[0] and time.monotonic() < deadline:
                time.sleep(0.002)
        except ChildProcessError:
            pass  # it has been collected


def wait_for_free_pids(client: object, seconds: float) -> None:
    """Wait until the processes of a restore that phosd has ended are gone: CRIU restores under the same pids."""
    jobs = [job for job in client.status().jobs if job.state == "mispredicted"]  # type: ignore[attr-defined]
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        if not any(os.path.exists(f"/proc/{pid}") for job in jobs[-1:] for pid in job.pids):
            return
        time.sleep(0.005)


def eagerly(command: list[str]) -> list[str]:
    """A command line of `criu restore` without --lazy-pages, but with the launcher's, which makes no page lazy."""
    if FILLS:
        return command
    return [word for word in command if not word.startswith("--la")]


def attempt(action: str, images: str, phosd: str, command: list[str]) -> tuple[int, bool]:
    """Run CRIU and wait for the GPU's part. Returns (exit status, whether a wrong guess spoilt a concurrent dump)."""
    began, before = time.time(), children_of(os.getpid())
    status, client = run(command, gently=action == "dump")
    # Before a frontend in them starts a phosd: that is an orphan as they are.
    restored = [pid for pid in children_of(os.getpid()) if pid not in before] if action == "restore" else []
    if status != 0:
        end_restored(restored)
        bring_back(phosd)
        if not isinstance(client, Exception):
            client.show_undone(images, restore=action == "restore", began=began)  # type: ignore[attr-defined]
        return finish(status), False
    if isinstance(client, Exception):
        sys.stderr.write(f"criu: CRIU is done, but the GPU's part cannot be waited for: {client}\n")
        end_restored(restored)
        return 1, False
    sys.argv = ["criu", "wait", images] if action == "dump" else ["criu", "wait", "--restore", images]
    answer = client.main()  # type: ignore[attr-defined]
    if answer == 0:
        return 0, False
    end_restored(restored)
    if answer == client.MISPREDICTED:  # type: ignore[attr-defined]
        return 1, True
    bring_back(phosd)  # it may have died since CRIU was done
    return 1, False


def main(argv: list[str]) -> int:
    """See the module's text. Returns CRIU's exit status, or 1 if CRIU succeeded and the GPU's part failed.

    A lazy restore in which a kernel touched memory that was not there yet is made anew from the same image, eagerly.
    A concurrent dump whose image could not be right, because a kernel wrote where nobody thought it would, is made anew
    with the processes standing still: in the same directory, rid of what CRIU had put there.
    """
    action, images, phosd, command = argv[1], argv[2], argv[3], argv[4:]
    if action == "dump" and (problem := configure()):
        sys.stderr.write(f"criu: {problem}\n")
        return 1
    before = entries(images)
    status, mispredicted = attempt(action, images, phosd, command)
    if not mispredicted:
        return status
    if action == "restore":
        from phos.gpu_engine.daemon import client

        wait_for_free_pids(client, 10.0)
        sys.stderr.write("criu: restoring once more, eagerly.\n")
        os.environ["PHOS_RESTORE"] = "eager"
        return attempt(action, images, phosd, eagerly(command))[0]
    sys.stderr.write("criu: dumping once more, by the stop protocol.\n")
    for name in entries(images) - before:
        if name.endswith(".img"):
            os.unlink(os.path.join(images, name))
    os.environ["PHOS_PROTOCOL"] = "stop"
    return attempt(action, images, phosd, command)[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv))
