/* A library that is taken for the driver: it has a lock, which is not 0 while a thread is inside. */
#include <string.h>
#include <stdlib.h>
#include <time.h>

volatile unsigned driver_lock;

static double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

/* Computes inside, and calls libc, and through it what another library may have put in the place of malloc(). */
void driver_ask(void)
{
	driver_lock = 1;
	for (int i = 0; i < 4; i++) {
		char *copy = strdup("a name");

		for (volatile int spin = 0; spin < 100; spin++)
			;
		free(copy);
	}
	driver_lock = 0;
	for (volatile int spin = 0; spin < 50; spin++)
		;
}

void driver_ask_for(double seconds)
{
	double until = now() + seconds;

	driver_lock = 1;
	while (now() < until)
		;
	driver_lock = 0;
}
