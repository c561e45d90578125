/* A connection between two launchers; see node_link.h. */
#include "launch/node_link.h"

#include "base/clock.h"
#include "os/socket.h"
#include "os/tls.h"

#include <errno.h>
#include <unistd.h>

enum { HEAD = 5, LARGEST = 64 << 20, PIECE = 65536 };

void td__node_link_open(struct td__node_link *link, int fd)
{
    *link = (struct td__node_link){.fd = fd, .heard_ns = td__now_ns(), .sent_ns = td__now_ns()};
    td__tune_tcp(fd);
}

static void end(struct td__node_link *link)
{
    if (link->fd >= 0)
        close(link->fd);
    link->fd = -1;
    td__buffer_free(&link->out);
}

void td__node_link_close(struct td__node_link *link)
{
    end(link);
    td__buffer_free(&link->in);
    link->taken = 0;
}

void td__node_link_flush(struct td__node_link *link)
{
    while (link->fd >= 0 && link->out.size) {
        ssize_t sent = td__sock_send(link->fd, link->out.data, link->out.size,
                                     MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent < 0 && errno == EAGAIN)
            return;
        if (sent < 0) {
            /* What the other side has sent before it closed can still be received. */
            td__buffer_free(&link->out);
            return;
        }
        td__buffer_consume(&link->out, (size_t)sent);
    }
}

void td__node_link_send(struct td__node_link *link, enum td__node_message kind, const void *body,
                        size_t size)
{
    if (link->fd < 0)
        return;
    td__buffer_put_u32(&link->out, (uint32_t)(size + 1));
    td__buffer_put_u8(&link->out, (uint8_t)kind);
    td__buffer_put(&link->out, body, size);
    link->sent_ns = td__now_ns();
    if (link->out.failed)
        end(link); /* without memory: the other side notices */
    td__node_link_flush(link);
}

void td__node_link_receive(struct td__node_link *link)
{
    while (link->fd >= 0 && link->in.size < LARGEST + HEAD) {
        if (!td__buffer_reserve(&link->in, PIECE)) {
            end(link);
            return;
        }
        ssize_t got = td__sock_recv(link->fd, link->in.data + link->in.size, PIECE, MSG_DONTWAIT);
        if (got > 0) {
            link->in.size += (size_t)got;
            link->heard_ns = td__now_ns();
        } else if (got == 0 || (errno != EINTR && errno != EAGAIN)) {
            end(link);
        } else if (errno == EAGAIN) {
            return;
        }
    }
}

bool td__node_link_next(struct td__node_link *link, enum td__node_message *kind,
                        struct td__span *body)
{
    td__buffer_consume(&link->in, link->taken);
    link->taken = 0;
    if (link->in.size < HEAD)
        return false;
    size_t size = td__load_u32(link->in.data);
    uint8_t code = link->in.data[4];
    if (!size || size > LARGEST || code >= TD__MESSAGE_KINDS) {
        end(link);
        td__buffer_free(&link->in);
        return false;
    }
    if (link->in.size < 4 + size)
        return false;
    *kind = (enum td__node_message)code;
    *body = (struct td__span){(const char *)link->in.data + HEAD, size - 1};
    link->taken = 4 + size;
    return true;
}
