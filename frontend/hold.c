/* The hold is a symbolic link HOLD = <folder of phosd's socket>/hold/<session in hex>, whose target reads
 * "<pid of phosd>:<start time>:<phosd's pid namespace>:<the held process's>" (older phosds leave the namespaces out).
 * While it is there and that phosd lives, nothing is to be done. Gone: ask phosd. There, but its phosd is dead, or nobody
 * listens: after two seconds start a phosd, as PHOS_DAEMON_COMMAND says.
 *
 * Several processes may come from one image, each in a pid namespace of its own, and their sessions have one name until
 * phosd gives them others (request.c). So a hold for a process of another namespace is none. From another namespace than
 * phosd's its pid means nothing: then phosd lives as long as it listens. And a process that has been restored into another
 * namespace starts no phosd, which would belong there and end with it. */
#include "hold.h"
#include "descriptors.h"
#include "held.h"
#include "log.h"
#include "runtime.h"
#include "wire_link.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* Written by phos_hold_init, constant afterwards. The environment is read then: it is the application's to change. */
static char socket_path[108], hold_path[256];
static char *daemon_words[64], *daemon_environment[512];
static unsigned long long first_namespace; /* where the process was started */

/* Environment strings and words are copied once and live as long as the process. */
static void prepare_daemon(void)
{
    const char *command = getenv("PHOS_DAEMON_COMMAND"), *libraries = getenv("PHOS_DAEMON_LIBRARY_PATH");
    char *copy = command && *command ? strdup(command) : NULL;
    char *rest = copy;
    size_t words = 0, kept = 0;
    for (char *word; rest && words + 1 < sizeof daemon_words / sizeof *daemon_words;) {
        word = strsep(&rest, " ");
        if (*word)
            daemon_words[words++] = word;
    }
    extern char **environ;
    for (char **e = environ; *e && kept + 2 < sizeof daemon_environment / sizeof *daemon_environment; e++) {
        if (!strncmp(*e, "LD_PRELOAD=", 11) || !strncmp(*e, "LD_LIBRARY_PATH=", 16))
            continue;
        daemon_environment[kept++] = strdup(*e);
    }
    if (libraries && *libraries) {
        char *setting = NULL;
        if (asprintf(&setting, "LD_LIBRARY_PATH=%s", libraries) > 0)
            daemon_environment[kept++] = setting;
    }
}

/* Of this process; 0 if it cannot be told. Without a descriptor. */
static unsigned long long pid_namespace(void)
{
    char text[64];
    ssize_t length = readlink("/proc/self/ns/pid", text, sizeof text - 1);
    text[length > 0 ? length : 0] = 0;
    const char *at = strchr(text, '[');
    return at ? strtoull(at + 1, NULL, 10) : 0;
}

void phos_hold_renamed(void)
{
    const char *slash = strrchr(socket_path, '/');
    int folder = slash ? (int)(slash - socket_path) : 1;
    int used = snprintf(hold_path, sizeof hold_path, "%.*s/hold/", folder, slash ? socket_path : ".");
    for (size_t i = 0; i < sizeof phos_session; i++)
        used += snprintf(hold_path + used, sizeof hold_path - (size_t)used, "%02x", phos_session[i]);
}

void phos_hold_init(void)
{
    const char *given = getenv("PHOS_SOCKET"), *runtime = getenv("XDG_RUNTIME_DIR");
    const char *usual = "/run/phos/phosd.sock";
    if (given && *given)
        snprintf(socket_path, sizeof socket_path, "%s", given);
    else if (geteuid() == 0 || access(usual, F_OK) == 0 || !runtime)
        snprintf(socket_path, sizeof socket_path, "%s", usual);
    else
        snprintf(socket_path, sizeof socket_path, "%s/phos/phosd.sock", runtime);
    if (given && strlen(given) >= sizeof socket_path)
        phos_warn("PHOS_SOCKET is longer than a socket's path may be (%zu bytes)", sizeof socket_path - 1);
    first_namespace = pid_namespace();
    phos_hold_renamed();
    prepare_daemon();
}

const char *phos_hold_socket(void)
{
    return socket_path;
}

/* Whether process pid is the one that started then, and has not ended: one that nobody reaps still has its number. */
static bool lives_since(pid_t pid, unsigned long long start)
{
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t length = file >= 0 ? read(file, text, sizeof text - 1) : -1;
    if (file >= 0)
        close(file);
    if (length <= 0)
        return false;
    text[length] = 0;
    const char *at = strrchr(text, ')'); /* the name before it may hold anything */
    if (at && at[1] && (at[2] == 'Z' || at[2] == 'X'))
        return false;
    for (int field = 2; at && field < 22; field++)
        at = strchr(at + 1, ' ');
    return at && strtoull(at + 1, NULL, 10) == start;
}

/* A process that has ended and that nobody reaps still takes signals, but has no program. Told without a descriptor. */
static bool zombie(pid_t pid)
{
    char path[64], program[8];
    snprintf(path, sizeof path, "/proc/%d/exe", (int)pid);
    return readlink(path, program, sizeof program) < 0 && errno == ENOENT;
}

enum hold { HOLD_NONE, HOLD_ALIVE, HOLD_DEAD };

/* Makes a descriptor for a moment. */
static bool listens(void)
{
    int link = phos_link_connect(socket_path, true);
    if (link >= 0)
        phos_held_close(link);
    return link >= 0;
}

static enum hold look(bool thoroughly)
{
    static char dead[128]; /* the control thread's alone: a target found dead stays so between thorough looks */
    char target[128];
    ssize_t length = readlink(hold_path, target, sizeof target - 1);
    if (length <= 0)
        return HOLD_NONE;
    target[length] = 0;
    char *end;
    long pid = strtol(target, &end, 10);
    if (pid <= 0 || *end != ':')
        return HOLD_DEAD;
    unsigned long long start = strtoull(end + 1, &end, 10), phosd_space = 0, mine = 0;
    if (*end == ':')
        phosd_space = strtoull(end + 1, &end, 10);
    if (phosd_space && *end == ':' && (mine = pid_namespace())) {
        unsigned long long held = strtoull(end + 1, NULL, 10);
        if (held && held != mine)
            return HOLD_NONE;
    }
    if (!strcmp(target, dead))
        return HOLD_DEAD;
    if (mine && mine != phosd_space) { /* rarely, as below */
        if (!thoroughly || listens())
            return HOLD_ALIVE;
        memcpy(dead, target, (size_t)length + 1);
        return HOLD_DEAD;
    }
    int failed = kill((pid_t)pid, 0) ? errno : 0;
    if (failed == ESRCH || (!failed && zombie((pid_t)pid)))
        return HOLD_DEAD;
    /* A number used again. Reading /proc needs a descriptor for some microseconds, so this is for long waits only, in
     * which CRIU, whose phosd is alive, is not about to freeze us. */
    if (!thoroughly || lives_since((pid_t)pid, start))
        return HOLD_ALIVE;
    memcpy(dead, target, (size_t)length + 1);
    return HOLD_DEAD;
}

static void daemon_exec(void)
{
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    setsid();
    int nowhere = open("/dev/null", O_RDWR);
    for (int d = 0; nowhere >= 0 && d < 3; d++)
        dup2(nowhere, d);
#ifdef SYS_close_range
    if (syscall(SYS_close_range, 3, ~0u, 0))
#endif
        for (int d = 3; d < 4096; d++)
            close(d);
    execvpe(daemon_words[0], daemon_words, daemon_environment);
}

/* Twice forked, so that it is nobody's child to wait for. The first fork sends no SIGCHLD and is not found by the
 * application's own wait(-1); neither runs the application's pthread_atfork handlers. */
static void daemon_start(void)
{
    if (!daemon_words[0] || pid_namespace() != first_namespace)
        return;
    phos_warn("phosd is gone while this process is detached: starting it again");
    pid_t first = (pid_t)syscall(SYS_clone, 0, NULL, NULL, NULL, 0);
    if (first == 0) {
        pid_t second = (pid_t)syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, 0);
        if (second == 0)
            daemon_exec();
        _exit(0);
    }
    if (first > 0)
        while (waitpid(first, NULL, __WCLONE) < 0 && errno == EINTR)
            continue;
}

int phos_hold_wait(void)
{
    /* Time is counted in sleeps: the clock of the machine where this process is restored may show anything. */
    unsigned waited_us = 0, trouble_us = 0, since_start_us = 5000000;
    for (;;) {
        /* Past half a minute, look at the start time every five seconds. */
        enum hold hold = look(waited_us > 30000000 && waited_us % 5000000 < 5000);
        if (hold == HOLD_ALIVE)
            trouble_us = 0;
        else if (hold == HOLD_NONE) {
            phos_descriptors_lift();
            int link = phos_link_connect(socket_path, true);
            if (link >= 0)
                return link;
        }
        if (trouble_us >= 2000000 && since_start_us >= 5000000) {
            daemon_start();
            since_start_us = 0;
        }
        /* Every look that comes late is part of the application's stall; one costs a microsecond or two. */
        unsigned pause = waited_us < 2000000 ? 250 : 5000;
        nanosleep(&(struct timespec){.tv_nsec = pause * 1000}, NULL);
        if (waited_us < 4000000000u)
            waited_us += pause;
        if (since_start_us < 4000000000u)
            since_start_us += pause;
        if (hold != HOLD_ALIVE)
            trouble_us += pause;
    }
}
