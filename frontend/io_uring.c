/* CRIU cannot dump a process with an io_uring (4.1.1 and 4.2: nobody who has one can be dumped). libuv makes one for every
 * event loop, PyTorch's torchrun and its store are built on libuv, and no setting of theirs keeps them from it. All do
 * without where the kernel has none: so for a process under PhOS it has none. Who makes the call in another way than by
 * libc's syscall() (liburing) gets one, and cannot be dumped.
 *
 * syscall() stands in the place of libc's here, for every call. It does what that does: seven words, a kernel's answer of
 * -4095 to -1 is an errno. */
#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define IO_URING_SETUP 425 /* of x86-64 */
#define LARGEST_ERROR 4095

/* By another name here: unistd.h declares it with an ellipsis. */
__attribute__((visibility("default"), no_sanitize("address", "undefined", "thread"))) long
phos_syscall(long number, long a, long b, long c, long d, long e, long f) __asm__("syscall");

#define APART __attribute__((noinline, cold, no_sanitize("address", "undefined", "thread")))

static APART bool has_io_uring(void)
{
    const char *wanted = getenv("PHOS_IO_URING");
    return wanted && !strcmp(wanted, "on");
}

static APART long failed(long error)
{
    errno = (int)error;
    return -1;
}

static inline __attribute__((always_inline)) long ask(long number, long a, long b, long c, long d, long e, long f)
{
    register long fourth __asm__("r10") = d, fifth __asm__("r8") = e, sixth __asm__("r9") = f;
    long result;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(fourth), "r"(fifth), "r"(sixth)
                     : "rcx", "r11", "memory");
    return __builtin_expect((unsigned long)result >= (unsigned long)-LARGEST_ERROR, 0) ? failed(-result) : result;
}

static APART long set_up(long number, long a, long b, long c, long d, long e, long f)
{
    return has_io_uring() ? ask(number, a, b, c, d, e, f) : failed(ENOSYS);
}

/* Without a frame, as libc's: by some calls a second process returns from here on the same stack. */
long phos_syscall(long number, long a, long b, long c, long d, long e, long f)
{
    if (__builtin_expect(number == IO_URING_SETUP, 0))
        return set_up(number, a, b, c, d, e, f);
    return ask(number, a, b, c, d, e, f);
}
