"""Run CRIU as a child, then wait for the GPU's part of the image (dump) or of the process (restore -d).

    supervise.py dump|restore IMAGE_FOLDER PHOSD CRIU [ARGUMENT...]

The child shares this process's terminal, descriptors and process group; its end, by status or by signal, is this
process's end. CRIU is started before anything slow is imported: Python reads the daemon's client while CRIU works.

A signal sent here interrupts what is done: phosd is asked to end it, and refuses CRIU's next request. A dump is undone.
CRIU works inside the processes that it traces, and one that it leaves in the middle of that dies of the breakpoint put
there: so it is killed only where it traces none, and ignores what is sent to the whole process group. A restore's
processes are killed, and CRIU fails for that and tidies up. This process ends, by that signal, when all of it is done.
"""

import os
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

FILLS = os.environ.pop("PHOS_FILL_PAGES", "")
"""The launcher has the plugin bring the memory of what is restored. For CRIU's environment, and nobody else's."""
ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

FOR_ONE_COMMAND = (
    "PHOS_PROTOCOL",
    "PHOS_COW_POOL",
    "PHOS_VALIDATE",
    "PHOS_PRIORITISE",
    "PHOS_RESTORE",
    "PHOS_RESTORE_GPUS",
    "PHOS_LAZY",
    "PHOS_GROWN_FILES",
)
"""What CRIU's plugin tells phosd: not for the environment of one that is started here, and serves others as well."""

FAIL_SECONDS = 10.0
"""How long a CRIU whose restored processes are killed may take to fail, and they to end: pids are used again."""


class Messages:
    """Standard error as it is written to here: what is done does not depend on anybody taking what is said of it."""

    def write(self, text: str) -> int:
        """Say it, if that can be."""
        try:
            os.write(2, text.encode(errors="backslashreplace"))
        except OSError:
            pass
        return len(text)

    def flush(self) -> None:
        """All is written at once."""


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
            beside = forks(child)
            os.kill(child, signal.SIGKILL)
            kill_all(beside)
            return
        os.kill(child, signal.SIGCONT)
        time.sleep(0.005)


def children(pid: int) -> set[int]:
    """A process's, as the kernel lists them: cheaper than a look at all processes."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as listed:
            return {int(word) for word in listed.read().split()}
    except OSError:
        return set()


def forks(pid: int) -> list[int]:
    """The children in which a program goes on itself. Those with which CRIU tries what the kernel can do stop, and wait
    to be traced: for ever if it is gone by then.
    """
    found = []
    for child in children(pid):
        try:
            if os.readlink(f"/proc/{child}/exe") == os.readlink(f"/proc/{pid}/exe"):
                with open(f"/proc/{child}/cmdline", "rb") as words, open(f"/proc/{pid}/cmdline", "rb") as its:
                    if words.read() == its.read():
                        found.append(child)
        except OSError:
            pass  # it has ended
    return found


def below(pid: int, spared: set[int]) -> list[int]:
    """All processes below process pid, but for these and what is below them, and phosd with its keeper."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", errors="replace") as stat:
                    parents[int(entry)] = int(stat.read().rpartition(") ")[2].split()[1])
                with open(f"/proc/{entry}/cmdline", "rb") as words:
                    line = words.read()
                if int(entry) in spared or b"phos.gpu_engine.daemon" in line or b"gpu_engine/daemon/keeper.py" in line:
                    del parents[int(entry)]
            except OSError:
                pass  # it has ended
    found: set[int] = set()
    new = {pid}
    while new:
        new = {child for child, parent in parents.items() if parent in new} - found
        found |= new
    return list(found)


def kill_all(pids: list[int]) -> None:
    """Kill those of these processes that there still are."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def reap() -> None:
    """Collect the children that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def finish(code: int) -> int:
    """Return an exit status; die of the signal that a negative one stands for."""
    if code < 0:
        if -code in (signal.SIGQUIT, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS):
            import resource

            resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    return code


def bring_back(phosd: str) -> None:
    """Whatever happened, a process that was detached for this dump is brought back by a phosd that lives.

    Out of reach of who interrupts this process group once more.
    """
    environment = {name: value for name, value in os.environ.items() if name not in FOR_ONE_COMMAND}
    try:
        _, status = os.waitpid(os.posix_spawn(phosd, [phosd, "--ensure"], environment, setsid=True), 0)
    except OSError:
        status = -1
    if status != 0:
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


def by_descriptor(images: str) -> str:
    """A name for the image directory that stays right, whatever it is called by the time that CRIU has ended."""
    try:
        return f"/proc/self/fd/{os.open(images, os.O_RDONLY | os.O_DIRECTORY)}"
    except OSError:  # CRIU says what is wrong with it
        return images


def fork_beside(images: str) -> int:
    """os.fork(), of a child with a pid that no process or thread of the image needs: it could not be restored.

    Where numbers end at 32,768 CRIU was given such a one now and then. An image names them in its files' names.
    """
    needed = entries(images)
    while True:
        child = os.fork()
        number = child or os.getpid()
        if f"core-{number}.img" not in needed:
            return child
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)


def adopt_orphans() -> None:
    """What CRIU leaves running becomes this process's child: only then can its pids be seen to be free again."""
    import ctypes

    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


def wait_for_free_pids(client: object, seconds: float) -> None:
    """Wait until the processes of a restore that phosd has ended are gone: CRIU restores under the same pids."""
    jobs = [job for job in client.status().jobs if job.state == "mispredicted"]  # type: ignore[attr-defined]
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        reap()
        if not any(os.path.exists(f"/proc/{pid}") for job in jobs[-1:] for pid in job.pids):
            return
        time.sleep(0.005)


def eagerly(command: list[str]) -> list[str]:
    """A command line of `criu restore` without --lazy-pages, but with the launcher's, which makes no page lazy."""
    if FILLS:
        return command
    return [word for word in command if not word.startswith("--la")]


class Supervisor:
    """CRIU's runs for one command line, and what a signal does to them."""

    def __init__(self, action: str, images: str, phosd: str, command: list[str]) -> None:
        self.action, self.images, self.phosd, self.command = action, images, phosd, command
        os.environ["PHOS_CRIU_RUN"] = os.urandom(8).hex()  # CRIU's plugin tells phosd
        self.asked = 0
        """The signal that came first, if any has."""
        self._ended = False  # what it asks for is done
        self._criu = 0
        self._runs = False
        self._client: object = None  # the module, or why there is none
        self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(self._wake[1], warn_on_full_buffer=False)
        self._former = children(os.getpid())  # of the shell that became this program

    def _received(self, number: int, _frame: object) -> None:
        self.asked = self.asked or number
        self._end_if_asked()

    def _end_if_asked(self) -> None:
        """End what CRIU and phosd do; in a signal's handler, or before one could come."""
        if not self.asked or self._ended or self._client is None:
            return
        self._ended = True
        if not isinstance(self._client, Exception):
            self._client.interrupt(self._criu)  # type: ignore[attr-defined]
        if self.action == "dump":
            if self._runs:
                end_untraced(self._criu)
            return
        deadline = time.monotonic() + FAIL_SECONDS
        while self._runs and state_of(self._criu) != "Z":
            kill_all(below(self._criu, set()))
            if time.monotonic() > deadline:
                kill_all([self._criu])
            time.sleep(0.005)

    def _await(self, descriptor: int) -> None:
        """Wait until there is something to be read, and for signals: one that comes just before another call of the
        kernel would be handled only when that returns.
        """
        import select

        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.register(self._wake[0], select.POLLIN)
        while True:
            ready = [found for found, _ in poll.poll()]
            if self._wake[0] in ready:
                os.read(self._wake[0], 4096)
            if descriptor in ready:
                return

    def _wait_for_gpu(self) -> int:
        """The client's exit status, when the image is whole or the processes compute, or never will."""
        import threading

        client: Any = self._client
        sys.argv = ["criu", "wait", *(["--restore"] if self.action == "restore" else []), self.images]
        answers: list[int] = []
        ended, ends = os.pipe()

        def wait() -> None:
            try:
                answers.append(client.main())
            finally:
                os.close(ends)

        try:
            threading.Thread(target=wait, daemon=True).start()
        except RuntimeError:  # there can be no more: a signal may be heeded late then
            wait()
        self._await(ended)
        os.close(ended)
        return answers[0] if answers else 1

    def end_restored(self) -> None:
        """Kill what a restore that has failed left behind, which has become ours.

        phosd does so too, unless it has died, or CRIU has before it named all of them.
        """
        if self.action != "restore":
            return
        deadline = time.monotonic() + FAIL_SECONDS
        while (left := below(os.getpid(), self._former)) and time.monotonic() < deadline:
            kill_all(left)
            time.sleep(0.005)
            reap()

    def _run(self) -> int:
        """Start CRIU, import the client meanwhile, and return CRIU's exit status (negative for a signal's number)."""
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        self._criu = fork_beside(self.images) if self.action == "restore" else os.fork()
        if self._criu == 0:
            for number in ENDING if self.action == "dump" else ():
                signal.signal(number, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and ignoring is inherited
            if FILLS:
                os.environ["PHOS_FILL_PAGES"] = FILLS
            try:
                os.execvp(self.command[0], self.command)
            except OSError as error:
                os.write(2, f"criu: {self.command[0]} could not be started: {error.strerror}\n".encode())
            os._exit(127)
        self._runs = True
        for number in ENDING:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._received)
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        if self.action == "restore":
            adopt_orphans()
        client: object
        try:
            from phos.gpu_engine.daemon import client
        except Exception as error:  # reported only when the client would be needed
            client = error
        self._client = client
        self._end_if_asked()
        pidfd = os.pidfd_open(self._criu)
        self._await(pidfd)
        os.close(pidfd)
        self._runs = False  # from here on nobody signals it
        _, status = os.waitpid(self._criu, 0)
        return os.waitstatus_to_exitcode(status)

    def _attempt(self) -> tuple[int, bool]:
        """Run CRIU and wait for the GPU's part. Returns (exit status, whether a wrong guess spoilt it)."""
        began = time.time()
        code = self._run()
        client: Any = self._client
        if code != 0:
            self.end_restored()
            bring_back(self.phosd)
            if not isinstance(client, Exception):
                client.show_undone(self.images, restore=self.action == "restore", began=began)
                if self.asked and self.action == "dump" and client.has_come(self.images, began):
                    # phosd was not to be interrupted any more, and CRIU had ended what the image is of.
                    sys.stderr.write("criu: the image is whole all the same.\n")
                    return 0, False
            return code, False
        if isinstance(client, Exception):
            sys.stderr.write(f"criu: CRIU is done, but the GPU's part cannot be waited for: {client}\n")
            self.end_restored()
            return 1, False
        answer = self._wait_for_gpu()
        if answer == client.NOBODY_KNOWS and self.action == "dump" and client.has_come(self.images, began):
            sys.stderr.write("criu: the image is whole all the same.\n")
            bring_back(self.phosd)
            return 0, False
        if answer == 0 and not (self.asked and self.action == "restore"):
            return 0, False
        self.end_restored()
        if answer == client.MISPREDICTED and not self.asked:
            return 1, True
        bring_back(self.phosd)  # it may have died since CRIU was done
        return 1, False

    def run(self) -> int:
        """CRIU's exit status (negative for a signal's number), or 1 if CRIU succeeded and the GPU's part failed.

        A lazy restore in which a kernel touched memory that was not there yet is made anew from the same image,
        eagerly. A concurrent dump whose image could not be right, because a kernel wrote where nobody thought it would,
        is made anew with the processes standing still: in the same directory, rid of what CRIU had put there.
        """
        before = entries(self.images)
        code, mispredicted = self._attempt()
        if mispredicted:
            if self.action == "restore":
                wait_for_free_pids(self._client, 10.0)
                sys.stderr.write("criu: restoring once more, eagerly.\n")
                os.environ["PHOS_RESTORE"] = "eager"
                os.environ.pop("PHOS_LAZY_PAGES", None)  # that server has ended with who was restored first
                self.command = eagerly(self.command)
            else:
                sys.stderr.write("criu: dumping once more, by the stop protocol.\n")
                for name in entries(self.images) - before:
                    if name.endswith(".img"):
                        os.unlink(os.path.join(self.images, name))
                os.environ["PHOS_PROTOCOL"] = "stop"
            if not self.asked:
                code, _ = self._attempt()
        return -self.asked if self.asked and code != 0 else code


def main(argv: list[str]) -> int:
    """See the module's text."""
    action, images, phosd, command = argv[1], argv[2], argv[3], argv[4:]
    # Python has none where there was no descriptor 2, which is another file's then.
    sys.stderr = open(os.devnull, "w") if sys.stderr is None else Messages()  # type: ignore[assignment]  # noqa: SIM115
    if action == "dump" and (problem := configure()):
        sys.stderr.write(f"criu: {problem}\n")
        return 1
    return finish(Supervisor(action, by_descriptor(images), phosd, command).run())


if __name__ == "__main__":
    # Not sys.exit(): a signal would end Python while it tidies up, as if it had interrupted what was done by then.
    os._exit(main(sys.argv))
