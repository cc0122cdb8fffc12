/* Appending chunks of GPU data to a data file of an image (append.h). No state but the caller's; any thread, one at a time
 * for each stripe. */
#define _GNU_SOURCE
#include "append.h"
#include "chunk_hash.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <string.h>
#include <sys/uio.h>

#define EXPORT __attribute__((visibility("default")))

#define ALIGNMENT 4096u /* of what O_DIRECT is given, in memory and in the file: fit for any block device */
#define PIECES_MOST 1024 /* UIO_MAXIOV: what one call takes */

/* Whether the file is written through the page cache from now on. */
static bool leave_direct(struct phos_stripe *stripe)
{
    int flags = fcntl(stripe->descriptor, F_GETFL);
    if (flags < 0 || fcntl(stripe->descriptor, F_SETFL, flags & ~O_DIRECT) < 0)
        return false;
    stripe->direct = 0;
    return true;
}

/* Writes pieces one behind the other, however often the kernel stops short; they are changed. `size` is for
 * stripe->missing alone: with the bytes that are to follow them. */
static int write_pieces(struct phos_stripe *stripe, struct iovec *pieces, int count, uint64_t offset, uint64_t size)
{
    uint64_t done = 0;
    while (count) {
        ssize_t n = pwritev(stripe->descriptor, pieces, count, (off_t)(offset + done));
        if (n <= 0) {
            int error = n ? errno : EIO;
            if (error == EINTR)
                continue;
            if (error == EINVAL && stripe->direct && leave_direct(stripe))
                continue; /* memory or file system are not fit for O_DIRECT after all */
            stripe->missing = size - done;
            return error;
        }
        done += (uint64_t)n;
        while (count && (size_t)n >= pieces->iov_len) {
            n -= (ssize_t)pieces->iov_len;
            pieces++;
            count--;
        }
        if (n) {
            pieces->iov_base = (char *)pieces->iov_base + n;
            pieces->iov_len -= (size_t)n;
        }
    }
    return 0;
}

static int write_padded(struct phos_stripe *stripe, const unsigned char *tail, uint64_t size, uint64_t offset)
{
    _Alignas(ALIGNMENT) unsigned char page[ALIGNMENT] = {0};
    struct iovec piece = {.iov_base = page, .iov_len = sizeof page};
    memcpy(page, tail, size);
    return write_pieces(stripe, &piece, 1, offset, sizeof page);
}

/* All chunks that have a place, which together are `total` bytes from stripe->end on: few large requests for the disk. */
static int write_direct(struct phos_stripe *stripe, const unsigned char *data, uint64_t size, const uint64_t *places,
                        uint64_t total)
{
    struct iovec pieces[PIECES_MOST];
    int count = 0;
    uint64_t offset = stripe->end, at = offset; /* where the pieces begin and end in the file */
    uint64_t tail = total % ALIGNMENT;          /* only the last chunk has one: it goes out by itself */
    bool joined = false;                        /* the last piece ends where the next chunk begins in memory too */
    int error;

    for (uint64_t i = 0; i * stripe->chunk < size; i++) {
        uint64_t from = i * stripe->chunk, length = size - from < stripe->chunk ? size - from : stripe->chunk;
        if (places[i] == PHOS_ZEROS) {
            joined = false;
            continue;
        }
        length &= ~(uint64_t)(ALIGNMENT - 1);
        if (!length)
            continue;
        if (joined) {
            pieces[count - 1].iov_len += length;
        } else {
            if (count == PIECES_MOST) {
                if ((error = write_pieces(stripe, pieces, count, offset, total - (offset - stripe->end))))
                    return error;
                offset = at;
                count = 0;
            }
            pieces[count++] = (struct iovec){.iov_base = (void *)(data + from), .iov_len = length};
            joined = true;
        }
        at += length;
    }
    if ((error = write_pieces(stripe, pieces, count, offset, total - (offset - stripe->end))))
        return error;
    return tail ? write_padded(stripe, data + size - tail, tail, at) : 0;
}

static void add_written(struct phos_stripe *stripe, uint64_t bytes)
{
    __atomic_store_n(&stripe->written, stripe->written + bytes, __ATOMIC_RELAXED);
}

/* With O_DIRECT all is hashed first, so that the disk sees large requests. Through memory each chunk is written right after
 * it was hashed, while it is still in the processor's cache. */
EXPORT int phos_append(struct phos_stripe *stripe, const unsigned char *data, uint64_t size, int known, unsigned char *hashes,
                       uint64_t *places, const unsigned char zero_hash[16], const unsigned char zero_tail_hash[16])
{
    const bool direct = stripe->direct;
    uint64_t at = stripe->end;
    int error;

    for (uint64_t i = 0; i * stripe->chunk < size; i++) {
        const unsigned char *piece = data + i * stripe->chunk;
        unsigned char *hash = hashes + i * PHOS_HASH_SIZE;
        uint64_t left = size - i * stripe->chunk, length = left < stripe->chunk ? left : stripe->chunk;
        if (!known) {
            uint64_t sums[2];
            phos_chunk_hash(piece, length, sums);
            memcpy(hash, sums, sizeof sums);
        }
        if (!memcmp(hash, left <= stripe->chunk ? zero_tail_hash : zero_hash, PHOS_HASH_SIZE)) {
            places[i] = PHOS_ZEROS;
            continue;
        }
        places[i] = at;
        if (!direct) {
            struct iovec whole = {.iov_base = (void *)piece, .iov_len = length};
            if ((error = write_pieces(stripe, &whole, 1, at, length)))
                return error;
            add_written(stripe, length);
        }
        at += length;
    }
    if (direct && at > stripe->end) {
        if ((error = write_direct(stripe, data, size, places, at - stripe->end)))
            return error;
        add_written(stripe, at - stripe->end);
    }
    stripe->end = (at + ALIGNMENT - 1) & ~(uint64_t)(ALIGNMENT - 1);
    return 0;
}
