/* images/append.c with a pwritev() that a test can replace. */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/uio.h>

typedef ssize_t write_call(int descriptor, const struct iovec *pieces, int count, off_t offset);

/* What is called instead, if not null; it returns a negative errno. */
__attribute__((visibility("default"))) write_call *phos_test_pwritev;

static ssize_t replaced(int descriptor, const struct iovec *pieces, int count, off_t offset)
{
    if (!phos_test_pwritev)
        return pwritev(descriptor, pieces, count, offset);
    ssize_t n = phos_test_pwritev(descriptor, pieces, count, offset);
    if (n >= 0)
        return n;
    errno = (int)-n;
    return -1;
}

#define pwritev replaced
#include "../../images/append.c"
