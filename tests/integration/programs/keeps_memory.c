/* keeps_memory MIB: two processes that look at their memory again and again, from its end to its beginning. Each prints ROUND when it
 * has seen all of it, and WRONG, and ends, if a page is not what it was. On SIGUSR1, one goes on as two, on
 * SIGUSR2 as a child of what is no longer this program. */
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE 4096

static volatile sig_atomic_t asked;

static void ask(int signal_number)
{
    asked = signal_number;
}

static void go_on(int as)
{
    asked = 0;
    if (fork() && as == SIGUSR2)
        execlp("sleep", "sleep", "60", (char *)NULL);
}

int main(int count, char **words)
{
    size_t pages = (count > 1 ? strtoul(words[1], NULL, 10) : 1) << 8;
    char *memory = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return 1;
    signal(SIGUSR1, ask);
    signal(SIGUSR2, ask);
    setvbuf(stdout, NULL, _IOLBF, 0);
    uint64_t own = fork() ? 1 : 2;
    for (size_t page = 0; page < pages; page++)
        *(uint64_t *)(memory + page * PAGE) = (page << 2) + own;
    for (;;) {
        for (size_t page = pages; page-- > 0;) {
            if (asked)
                go_on(asked);
            if (*(volatile uint64_t *)(memory + page * PAGE) != (page << 2) + own) {
                printf("WRONG page %zu\n", page);
                _exit(1);
            }
        }
        printf("ROUND %d\n", (int)own);
        usleep(50000);
    }
}
