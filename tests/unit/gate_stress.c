/* The gate under many threads, built by test_frontend_gate.py with and without ThreadSanitizer, once with membarrier and
 * once without (ThreadSanitizer does not know membarrier, and checks the fenced form).
 *
 * Usage: gate_stress stress|fenced|trace|straggler|early|exit|fork|overhead [ROUNDS [fenced]]. Exit status 0: all is well; else a line says what is not. */
#include "gate.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define THREADS 8

static void check(bool holds, const char *what)
{
    if (!holds) {
        printf("%s\n", what);
        exit(1);
    }
}

/* Plain data: each thread touches its own inside the gate, the closing thread touches all while the gate is closed. A
 * gate that lets both in at once shows as a data race, or as a torn pair. */
static struct pair {
    uint64_t first, second;
    char apart[112];
} pairs[THREADS];
static atomic_bool stop;
static _Atomic uint64_t passes;

static void touch(struct pair *pair)
{
    uint64_t seen = pair->first;
    check(seen == pair->second, "a thread inside saw the closing thread at work");
    pair->first = seen + 1;
    pair->second = seen + 1;
}

static void inside(int number, uint32_t entry)
{
    uint32_t before;
    enum phos_gate_answer answer = phos_gate_enter(entry, &before);
    check(answer == PHOS_GATE_PASS, "an open gate did not let a thread pass");
    touch(&pairs[number]);
    uint32_t nested;
    check(phos_gate_enter(entry + 1, &nested) == PHOS_GATE_NESTED, "a nested call was not seen as nested");
    phos_gate_leave(nested);
    phos_gate_leave(before);
}

static void *work(void *argument)
{
    int number = (int)(intptr_t)argument;
    uint64_t done = 0;
    while (!atomic_load_explicit(&stop, memory_order_relaxed)) {
        inside(number, 10);
        done++;
    }
    atomic_fetch_add(&passes, done);
    return NULL;
}

/* Threads that live for one call: registering and leaving race with closing. */
static void *once(void *argument)
{
    inside((int)(intptr_t)argument, 20);
    return NULL;
}

static void *churn(void *argument)
{
    while (!atomic_load_explicit(&stop, memory_order_relaxed)) {
        pthread_t thread;
        if (!pthread_create(&thread, NULL, once, argument))
            pthread_join(thread, NULL);
    }
    return NULL;
}

static void stress(int rounds)
{
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, i < THREADS - 2 ? work : churn, (void *)(intptr_t)i);
    struct phos_gate_straggler who;
    for (int round = 0; round < rounds; round++) {
        check(phos_gate_close(5000000000u, &who, NULL), "the gate could not be closed");
        for (int i = 0; i < THREADS; i++) {
            pairs[i].second = ~0ull;
            uint64_t seen = pairs[i].first;
            if (round % 16 == 0)
                usleep(10);
            check(pairs[i].first == seen, "a thread was inside a closed gate");
            pairs[i].second = seen;
        }
        phos_gate_open();
        if (round % 8 == 0)
            usleep(200);
    }
    atomic_store(&stop, true);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    check(atomic_load(&passes) > 0, "nobody passed");
}

/* What a window keeps: touched by traced threads only, plainly by the one that ends the window. */
static uint64_t window_open;
static _Atomic uint64_t traced_passes;

static void *trace_work(void *argument)
{
    int number = (int)(intptr_t)argument;
    while (!atomic_load_explicit(&stop, memory_order_relaxed)) {
        uint32_t before, nested;
        enum phos_gate_answer answer = phos_gate_enter(50, &before);
        if (answer == PHOS_GATE_TRACED_PASS) {
            check(window_open == 1, "a thread was traced without a window");
            check(phos_gate_enter(51, &nested) == PHOS_GATE_NESTED, "a nested call of a traced one was not seen as nested");
            phos_gate_leave(nested);
            touch(&pairs[number]);
            check(window_open == 1, "a window ended over a traced thread");
            atomic_fetch_add_explicit(&traced_passes, 1, memory_order_relaxed);
            phos_gate_untrace_self();
        } else
            check(answer == PHOS_GATE_PASS, "an open gate did not let a thread pass");
        phos_gate_leave(before);
    }
    return NULL;
}

/* Windows begin with the gate closed and end with it open, as threads come and go. */
static void trace(int rounds)
{
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, trace_work, (void *)(intptr_t)i);
    struct phos_gate_straggler who;
    for (int round = 0; round < rounds; round++) {
        check(phos_gate_close(5000000000u, &who, NULL), "the gate could not be closed");
        window_open = 1;
        phos_gate_trace(true, NULL);
        phos_gate_open();
        usleep(round % 4 ? 50 : 300);
        phos_gate_trace(false, NULL);
        window_open = 0;
        for (int i = 0; i < THREADS; i++) {
            pairs[i].second = ~0ull;
            pairs[i].second = pairs[i].first;
        }
    }
    atomic_store(&stop, true);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    check(atomic_load(&traced_passes) > 0, "nobody was traced");
}

static atomic_bool entered, leave_now;

static void *linger(void *unused)
{
    uint32_t before;
    phos_gate_enter(77, &before);
    atomic_store(&entered, true);
    while (!atomic_load(&leave_now))
        usleep(100);
    phos_gate_leave(before);
    return unused;
}

static int pumped;

static bool pump(void)
{
    pumped++;
    return true;
}

static void straggler(void)
{
    pthread_t thread;
    pthread_create(&thread, NULL, linger, NULL);
    while (!atomic_load(&entered))
        usleep(100);
    struct phos_gate_straggler who = {0};
    check(!phos_gate_close(20000000, &who, pump), "the gate closed over a thread inside");
    check(who.entry == 77 && who.tid > 0 && who.tid != (int32_t)getpid(), "the straggler was not named");
    check(!phos_gate_is_closed(), "the gate stayed closed after a failure");
    check(pumped > 0, "nothing was pumped while waiting");
    atomic_store(&leave_now, true);
    check(phos_gate_close(5000000000u, &who, NULL), "the gate could not be closed after the straggler left");
    pthread_join(thread, NULL);
    phos_gate_lose();
    uint32_t before;
    check(phos_gate_enter(1, &before) == PHOS_GATE_REFUSED, "a lost gate let a thread pass");
}

static atomic_bool called, ready;

static void *call_then_linger(void *unused)
{
    inside(2, 60);
    atomic_store(&called, true);
    while (!atomic_load(&ready))
        usleep(100);
    return linger(unused);
}

/* A thread whose first call came before cuInit is waited for like any other. */
static void early(void)
{
    pthread_t thread;
    inside(1, 60);
    pthread_create(&thread, NULL, call_then_linger, NULL);
    while (!atomic_load(&called))
        usleep(100);
    phos_gate_init();
    atomic_store(&ready, true);
    while (!atomic_load(&entered))
        usleep(100);
    struct phos_gate_straggler who = {0};
    check(!phos_gate_close(20000000, &who, NULL), "the gate closed over a thread that had called before cuInit");
    atomic_store(&leave_now, true);
    pthread_join(thread, NULL);
    check(phos_gate_close(5000000000u, &who, NULL), "the gate could not be closed after that thread ended");
}

static pthread_key_t late_key;

static void late(void *value)
{
    uint32_t before;
    check(phos_gate_enter(5, &before) == PHOS_GATE_PASS, "a destructor's call did not pass");
    phos_gate_leave(before);
    intptr_t left = (intptr_t)value - 1;
    if (left)
        pthread_setspecific(late_key, (void *)left);
}

static void *with_late(void *unused)
{
    pthread_setspecific(late_key, (void *)(intptr_t)4);
    inside(0, 30);
    return unused;
}

/* Calls from thread-exit destructors, in every round of them. */
static void thread_exit(void)
{
    pthread_key_create(&late_key, late);
    for (int i = 0; i < 200; i++) {
        pthread_t thread;
        pthread_create(&thread, NULL, with_late, NULL);
        pthread_join(thread, NULL);
        struct phos_gate_straggler who;
        check(phos_gate_close(1000000000u, &who, NULL), "a thread that ended is still inside");
        phos_gate_open();
    }
}

/* A child forked while the gate is closed, and while others are inside, has an open gate to itself. */
static void forked(void)
{
    pthread_atfork(NULL, NULL, phos_gate_forked);
    pthread_t thread;
    pthread_create(&thread, NULL, linger, NULL);
    while (!atomic_load(&entered))
        usleep(100);
    inside(1, 40);
    atomic_fetch_or(&phos_gate_word, PHOS_GATE_CLOSED);
    pid_t child = fork();
    if (child == 0) {
        inside(1, 40);
        struct phos_gate_straggler who;
        _exit(phos_gate_close(100000000, &who, NULL) ? 0 : 3);
    }
    int status = 0;
    waitpid(child, &status, 0);
    check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child of a fork does not have the gate to itself");
    phos_gate_open();
    atomic_store(&leave_now, true);
    pthread_join(thread, NULL);
}

static __attribute__((noinline)) int nothing(int value)
{
    __asm__ volatile("" : "+r"(value));
    return value;
}

static __attribute__((noinline)) int gated(int value)
{
    uint32_t before;
    if (__builtin_expect(phos_gate_enter(3, &before) > PHOS_GATE_NESTED, 0))
        return -1;
    int result = nothing(value);
    phos_gate_leave(before);
    return result;
}

static __attribute__((noinline)) int direct(int value)
{
    int result = nothing(value);
    __asm__ volatile("" : "+r"(result));
    return result;
}

static double cost_ns(int (*call)(int), long count)
{
    struct timespec a, b;
    clock_gettime(CLOCK_MONOTONIC, &a);
    for (long i = 0; i < count; i++)
        call((int)i);
    clock_gettime(CLOCK_MONOTONIC, &b);
    return ((double)(b.tv_sec - a.tv_sec) * 1e9 + (double)(b.tv_nsec - a.tv_nsec)) / (double)count;
}

static void overhead(void)
{
    double best_gated = 1e9, best_direct = 1e9;
    cost_ns(gated, 1000);
    for (int i = 0; i < 9; i++) {
        double g = cost_ns(gated, 5000000), d = cost_ns(direct, 5000000);
        best_gated = g < best_gated ? g : best_gated;
        best_direct = d < best_direct ? d : best_direct;
    }
    printf("%.3f %.3f\n", best_direct, best_gated);
}

static bool bind(void)
{
    return true;
}

int main(int count, char **arguments)
{
    const char *what = count > 1 ? arguments[1] : "";
    phos_gate_bind = bind;
    if (strcmp(what, "early"))
        phos_gate_init();
    int rounds = count > 2 ? atoi(arguments[2]) : 2000;
    if (!strcmp(what, "fenced") || (!strcmp(what, "trace") && count > 3))
        atomic_fetch_or(&phos_gate_word, PHOS_GATE_FENCED);
    if (!strcmp(what, "stress") || !strcmp(what, "fenced"))
        stress(rounds);
    else if (!strcmp(what, "trace"))
        trace(rounds);
    else if (!strcmp(what, "straggler"))
        straggler();
    else if (!strcmp(what, "early"))
        early();
    else if (!strcmp(what, "exit"))
        thread_exit();
    else if (!strcmp(what, "fork"))
        forked();
    else if (!strcmp(what, "overhead"))
        overhead();
    else
        return 2;
    return 0;
}
