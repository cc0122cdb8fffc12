/* Stops a process again and again as CRIU does, has the threads that are inside its driver leave it (leave_driver.c), looks at
 * what has become of them, and lets it go.
 *
 * leave_driver_tracer PID ROUNDS LOCK [die]: LOCK is the address, in hexadecimal, of a word in the process that is not 0 while
 * a thread is in its driver. Prints one line: rounds, how often the word was not 0 at a stop of ours, and after the walk,
 * threads that the walk has started, and the longest walk in ms. "die": sends itself SIGTERM during the first walk. Status 1:
 * a walk failed. */
#include "criu_log.h"
#include "phos_plugin.h"

#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define THREADS 4096

static int threads[THREADS];
static size_t count;

static bool is_known(int thread)
{
	for (size_t i = 0; i < count; i++)
		if (threads[i] == thread)
			return true;
	return false;
}

/* Calls `found` for each thread that is not known; how many there were. */
static size_t for_unknown(int pid, void (*found)(int thread))
{
	char path[32];
	size_t unknown = 0;
	struct dirent *entry;
	DIR *tasks;

	snprintf(path, sizeof(path), "/proc/%d/task", pid);
	tasks = opendir(path);
	while (tasks && (entry = readdir(tasks))) {
		int thread = atoi(entry->d_name);

		if (thread <= 0 || is_known(thread))
			continue;
		unknown++;
		if (found)
			found(thread);
	}
	if (tasks)
		closedir(tasks);
	return unknown;
}

static void seize(int thread)
{
	int status;

	if (count == THREADS || ptrace(PTRACE_SEIZE, thread, 0, 0))
		return; /* it has ended */
	ptrace(PTRACE_INTERRUPT, thread, 0, 0);
	if (waitpid(thread, &status, __WALL) == thread && WIFSTOPPED(status))
		threads[count++] = thread;
}

static unsigned read_word(int pid, unsigned long address)
{
	unsigned word = 0;
	struct iovec here = { &word, sizeof(word) }, there = { (void *)address, sizeof(word) };

	if (process_vm_readv(pid, &here, 1, &there, 1, 0) != sizeof(word))
		word = 0;
	return word;
}

static double now_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

int main(int argc, char **argv)
{
	int pid = atoi(argv[1]), rounds = atoi(argv[2]), failed = 0;
	unsigned long lock = strtoul(argv[3], NULL, 16);
	size_t held = 0, held_after = 0, started = 0;
	double longest = 0;

	for (int i = 0; i < rounds && !failed; i++) {
		double began, took;

		count = 0;
		while (for_unknown(pid, seize) && count < THREADS)
			;
		held += !!read_word(pid, lock);
		if (argc > 4 && !fork()) { /* a child that does nothing else */
			usleep(300000);
			kill(getppid(), SIGTERM);
			_exit(0);
		}
		began = now_ms();
		failed = phos_leave_driver(pid, -1);
		took = now_ms() - began;
		longest = took > longest ? took : longest;
		held_after += !!read_word(pid, lock);
		started += for_unknown(pid, NULL);
		for (size_t t = 0; t < count; t++)
			ptrace(PTRACE_DETACH, threads[t], 0, 0);
		usleep(1000 + (unsigned)rand() % 4000);
	}
	printf("%d %zu %zu %zu %.0f\n", rounds, held, held_after, started, longest);
	return failed ? 1 : 0;
}
