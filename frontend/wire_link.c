#include "wire_link.h"
#include "descriptors.h"
#include "held.h"
#include "log.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

int phos_link_connect(const char *path, bool at_once)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address.sun_path)
        return -1;
    strcpy(address.sun_path, path);
    /* Asked every 100 ms for as long as there is no phosd: then not even a socket is made. */
    if (access(path, F_OK))
        return -1;
    phos_held_lock();
    int low = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    int link = low < 0 ? low : at_once ? phos_descriptor_raise_at_once(low) : phos_descriptor_raise(low);
    if (link >= 0)
        phos_held_note(link);
    phos_held_unlock();
    if (link < 0)
        return -1;
    int wanted = 1 << 20;
    setsockopt(link, SOL_SOCKET, SO_SNDBUF, &wanted, sizeof wanted);
    if (connect(link, (struct sockaddr *)&address, sizeof address)) {
        phos_held_close(link);
        return -1;
    }
    return link;
}

bool phos_link_send(int link, const Phos__Wire__Envelope *envelope, const int *descriptors, size_t count)
{
    size_t size = phos__wire__envelope__get_packed_size(envelope);
    uint8_t *bytes = size <= PHOS_PACKET_MAX ? malloc(size ? size : 1) : NULL;
    if (!bytes) {
        phos_warn("a message of %zu bytes does not fit a packet", size);
        return false;
    }
    phos__wire__envelope__pack(envelope, bytes);
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof(int) * PHOS_PACKET_DESCRIPTORS)];
    } control;
    struct iovec vector = {bytes, size};
    struct msghdr message = {.msg_iov = &vector, .msg_iovlen = 1};
    if (count) {
        memset(&control, 0, sizeof control);
        message.msg_control = &control;
        message.msg_controllen = CMSG_SPACE(sizeof(int) * count);
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int) * count);
        memcpy(CMSG_DATA(header), descriptors, sizeof(int) * count);
    }
    ssize_t sent;
    do {
        sent = sendmsg(link, &message, MSG_NOSIGNAL);
        /* Too many descriptors in flight for this user (RLIMIT_NOFILE): the receiver has to catch up. */
        if (sent < 0 && errno == ETOOMANYREFS)
            poll(NULL, 0, 5);
    } while (sent < 0 && (errno == EINTR || errno == ETOOMANYREFS));
    int saved = errno;
    free(bytes);
    errno = saved;
    return sent == (ssize_t)size;
}

static void take_descriptors(struct msghdr *message, struct phos_packet *packet)
{
    for (struct cmsghdr *header = CMSG_FIRSTHDR(message); header; header = CMSG_NXTHDR(message, header)) {
        if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS)
            continue;
        size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count; i++) {
            int descriptor;
            memcpy(&descriptor, CMSG_DATA(header) + i * sizeof(int), sizeof descriptor);
            if (packet->descriptor_count == PHOS_PACKET_DESCRIPTORS) {
                close(descriptor);
                continue;
            }
            packet->descriptors[packet->descriptor_count++] = descriptor;
            phos_held_note(descriptor);
        }
    }
}

enum phos_received phos_link_receive(int link, struct phos_packet *packet)
{
    uint8_t *bytes = malloc(PHOS_PACKET_MAX);
    if (!bytes)
        return PHOS_RECEIVED_END;
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof(int) * (PHOS_PACKET_DESCRIPTORS + 53))]; /* SCM_MAX_FD is 253 */
    } control;
    struct iovec vector = {bytes, PHOS_PACKET_MAX};
    struct msghdr message = {
        .msg_iov = &vector, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    ssize_t got;
    *packet = (struct phos_packet){0};
    phos_held_lock();
    do
        got = recvmsg(link, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    while (got < 0 && errno == EINTR);
    int saved = errno;
    if (got > 0)
        take_descriptors(&message, packet);
    phos_held_unlock();
    if (got <= 0) {
        bool nothing = got < 0 && (saved == EAGAIN || saved == EWOULDBLOCK);
        free(bytes);
        return nothing ? PHOS_RECEIVED_NOTHING : PHOS_RECEIVED_END;
    }
    packet->envelope = phos__wire__envelope__unpack(NULL, (size_t)got, bytes);
    free(bytes);
    if (!packet->envelope || message.msg_flags & (MSG_CTRUNC | MSG_TRUNC)) {
        phos_warn("phosd sent a packet that cannot be read; the connection is dropped");
        phos_packet_free(packet);
        return PHOS_RECEIVED_END;
    }
    return PHOS_RECEIVED;
}

void phos_packet_free(struct phos_packet *packet)
{
    for (size_t i = 0; i < packet->descriptor_count; i++)
        if (packet->descriptors[i] >= 0)
            phos_held_close(packet->descriptors[i]);
    if (packet->envelope)
        phos__wire__envelope__free_unpacked(packet->envelope, NULL);
    packet->envelope = NULL;
    packet->descriptor_count = 0;
}
