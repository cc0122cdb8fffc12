/* A program for leave_driver_tracer: prints the address of the driver's lock, then does for ever what its argument says.
 *
 * ask: three threads are in the driver most of the time. start: threads that start threads, each of which is in the driver for a
 * moment; what they block is looked at. long: one thread is in the driver for a second and more; SIGUSR1 makes it print
 * "signal". outside: one that copies all the time, and has never been in the driver, only its stack looks so. */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

extern volatile unsigned driver_lock;
void driver_ask(void);
void driver_ask_for(double seconds);

static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER; /* in the driver at a time: the lock is a word */

static void check_signals(const char *who)
{
	sigset_t blocked;

	pthread_sigmask(SIG_BLOCK, NULL, &blocked);
	if (sigismember(&blocked, SIGTERM)) {
		printf("%s blocks signals\n", who);
		_exit(1);
	}
}

static void *ask(void *unused)
{
	for (;;) {
		pthread_mutex_lock(&one);
		driver_ask();
		pthread_mutex_unlock(&one);
	}
	return unused;
}

static void *started(void *unused)
{
	check_signals("a thread that was started");
	pthread_mutex_lock(&one);
	driver_ask();
	pthread_mutex_unlock(&one);
	return unused;
}

static void *start(void *unused)
{
	void (*volatile looks_so[4])(void) = { driver_ask };
	pthread_attr_t large; /* its stack is not one that is kept for the next */

	(void)looks_so;
	pthread_attr_init(&large);
	pthread_attr_setstacksize(&large, 64 << 20);
	for (;;) {
		pthread_t thread;

		if (pthread_create(&thread, &large, started, NULL) || pthread_join(thread, NULL))
			_exit(2);
		check_signals("a thread that starts others");
		usleep(1000);
	}
	return unused;
}

static void say(int signal)
{
	(void)signal;
	if (write(STDOUT_FILENO, "signal\n", 7) != 7)
		_exit(3);
}

static void *sleeps(void *unused)
{
	for (;;)
		pause();
	return unused;
}

static void *outside(void *unused)
{
	void (*volatile looks_so[4])(void) = { driver_ask };
	size_t size = 64 << 20;
	char *from = calloc(1, size), *to = malloc(size);
	void *(*volatile copy)(void *, const void *, size_t) = memcpy;

	(void)looks_so;
	for (;;)
		copy(to, from, size);
	return unused;
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "";
	void *(*threads[3])(void *) = { NULL };

	setvbuf(stdout, NULL, _IOLBF, 0);
	printf("%p\n", (void *)(size_t)&driver_lock);
	if (!strcmp(what, "ask"))
		threads[0] = threads[1] = threads[2] = ask;
	else if (!strcmp(what, "start"))
		threads[0] = threads[1] = start;
	else if (!strcmp(what, "outside"))
		threads[0] = outside;
	for (size_t i = 0; i < 3 && threads[i]; i++) {
		pthread_t thread;

		if (pthread_create(&thread, NULL, threads[i], NULL))
			return 2;
	}
	if (!strcmp(what, "long")) {
		pthread_t thread; /* another one, which is nowhere near the driver */

		if (pthread_create(&thread, NULL, sleeps, NULL))
			return 2;
		signal(SIGUSR1, say);
		for (;;) {
			driver_ask_for(1.5);
			puts("asked");
		}
	}
	for (;;)
		pause();
}
