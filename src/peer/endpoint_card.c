/* The cards of all ranks: their hosts, addresses and processes; see endpoint.h. */
#include "base/fail.h"
#include "base/host.h"
#include "os/process.h"
#include "peer/endpoint_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAGIC = 0x64740403 };

/* Two ranks share memory if they have the same kernel, network namespace (which has their unix sockets) and user. */
static void find_host_id(char text[TD__CARD_TEXT])
{
    const char *given = getenv("TANDEM_HOST_ID");
    char boot[64];
    struct stat space = {0};
    if (given && *given) {
        snprintf(text, TD__CARD_TEXT, "given:%.100s", given);
        return;
    }
    td__boot_name(boot);
    stat("/proc/self/ns/net", &space);
    snprintf(text, TD__CARD_TEXT, "%s:%s:%llu:%u", *boot ? boot : "?", *boot ? "" : td__host_name(),
             (unsigned long long)space.st_ino, (unsigned)td__user_outside());
}

void td__endpoint_card(const struct td__endpoint *endpoint, struct td__buffer *card)
{
    const struct td__card *own = &endpoint->own;
    td__buffer_put_u32(card, MAGIC);
    td__buffer_put_u32(card, (uint32_t)own->pid);
    td__buffer_put_u32(card, (uint32_t)own->port);
    td__buffer_put_u32(card, own->number);
    td__buffer_put_u8(card, (uint8_t)(endpoint->shared | own->tls << 1));
    td__buffer_put_u64(card, own->pid_space);
    td__buffer_put_string(card, own->identity, sizeof own->identity);
    td__buffer_put_string(card, own->host_id, strlen(own->host_id));
    td__buffer_put_string(card, own->host_name, strlen(own->host_name));
    td__buffer_put_string(card, own->address, strlen(own->address));
    td__buffer_put_string(card, own->local, strlen(own->local));
}

static void read_text(struct td__reader *reader, char text[TD__CARD_TEXT])
{
    struct td__span span = td__reader_string(reader, TD__CARD_TEXT - 1);
    if (span.size)
        memcpy(text, span.data, span.size);
    text[span.size] = 0;
}

static bool read_card(const td_bytes *card, struct td__card *peer)
{
    struct td__reader reader = td__reader_of(card->data, card->size);
    bool known = td__reader_u32(&reader) == MAGIC;
    peer->pid = (int)td__reader_u32(&reader);
    peer->port = (int)td__reader_u32(&reader);
    peer->number = td__reader_u32(&reader);
    uint8_t flags = td__reader_u8(&reader);
    peer->shared = flags & 1;
    peer->tls = flags & 2;
    peer->pid_space = td__reader_u64(&reader);
    struct td__span identity = td__reader_string(&reader, TD__IDENTITY_SIZE);
    known = known && identity.size == TD__IDENTITY_SIZE;
    if (known)
        memcpy(peer->identity, identity.data, TD__IDENTITY_SIZE);
    read_text(&reader, peer->host_id);
    read_text(&reader, peer->host_name);
    read_text(&reader, peer->address);
    read_text(&reader, peer->local);
    return known && td__reader_done(&reader) && peer->port >= 0 && peer->port <= 65535;
}

/* Numbers the host of a new card. A rank that does not share memory is a host of its own for all ranks. Quadratic only
 * in the number of hosts. The caller holds the lock. */
static bool number_host(struct td__endpoint *endpoint, struct td__card *peer)
{
    struct td__card *const *first = (struct td__card *const *)endpoint->hosts.data;
    int hosts = (int)(endpoint->hosts.size / sizeof *first), host = peer->shared ? 0 : hosts;
    while (host < hosts && (!first[host]->shared || strcmp(first[host]->host_id, peer->host_id)))
        host++;
    peer->host = host;
    if (host == hosts)
        td__buffer_put(&endpoint->hosts, &peer, sizeof peer);
    return !endpoint->hosts.failed;
}

/* Owns the card. */
static td_status publish_card(struct td__endpoint *endpoint, int rank, struct td__card *peer)
{
    pthread_mutex_lock(&endpoint->lock);
    bool added = !td__peer(endpoint, rank);
    bool numbered = !added || number_host(endpoint, peer);
    added = added && numbered;
    if (added) {
        atomic_store_explicit(&endpoint->peers[rank], peer, memory_order_release);
        if (rank >= atomic_load(&endpoint->size))
            atomic_store_explicit(&endpoint->size, rank + 1, memory_order_release);
    }
    pthread_mutex_unlock(&endpoint->lock);
    if (!added)
        free(peer);
    return numbered ? TD_OK : td__fail_nomem("endpoint");
}

td_status td__endpoint_add_rank(struct td__endpoint *endpoint, int rank, const td_bytes *card)
{
    struct td__card *peer = calloc(1, sizeof *peer);
    if (!peer)
        return td__fail_nomem("endpoint");
    td_status status = TD_OK;
    peer->lifeline = peer->pulse = -1;
    if (!read_card(card, peer))
        status = td_fail(TD_ERR_MISMATCH,
                         "the card of rank %d is not valid for rank %d; all ranks must run the "
                         "same version of Tandem",
                         rank, endpoint->rank);
    else if (peer->tls != endpoint->own.tls)
        status = td_fail(TD_ERR_MISMATCH,
                         "TANDEM_TLS is %d on rank %d and %d on rank %d; it must be the same on "
                         "all ranks",
                         peer->tls, rank, endpoint->own.tls, endpoint->rank);
    if (!status)
        return publish_card(endpoint, rank, peer);
    free(peer);
    return status;
}

td_status td__endpoint_connect_all(struct td__endpoint *endpoint, const td_bytes *cards)
{
    for (int r = 0; r < endpoint->capacity; r++)
        TD_TRY(td__endpoint_add_rank(endpoint, r, &cards[r]));
    return TD_OK;
}

bool td__endpoint_knows(const struct td__endpoint *endpoint, int rank)
{
    return td__peer(endpoint, rank);
}

void td__cards_free(struct td__endpoint *endpoint)
{
    struct td__card *peer;
    TD__PEER_FOREACH (peer, r, endpoint) {
        td__exclusion_free(peer);
        td__pulse_end(peer);
        free(peer);
    }
    free(endpoint->peers);
    td__buffer_free(&endpoint->hosts);
}

int td__endpoint_rank(const struct td__endpoint *endpoint)
{
    return endpoint->rank;
}

int td__endpoint_size(const struct td__endpoint *endpoint)
{
    return atomic_load(&endpoint->size);
}

int td__endpoint_host(const struct td__endpoint *endpoint, int rank)
{
    return td__peer(endpoint, rank)->host;
}

int td__endpoint_pid(const struct td__endpoint *endpoint, int rank)
{
    return td__peer(endpoint, rank)->pid;
}

const char *td__endpoint_describe(const struct td__endpoint *endpoint, int rank)
{
    static _Thread_local char text[TD__CARD_TEXT + 64];
    const struct td__card *peer = td__peer(endpoint, rank);
    snprintf(text, sizeof text, "rank %d (on %s, pid %d)", rank, peer->host_name, peer->pid);
    return text;
}

void td__card_fill_in(struct td__card *card, const char *host)
{
    struct stat space = {0};
    card->pid = (int)getpid();
    stat("/proc/self/ns/pid", &space);
    card->pid_space = space.st_ino;
    find_host_id(card->host_id);
    snprintf(card->host_name, TD__CARD_TEXT, "%.100s", td__host_name());
    snprintf(card->address, TD__CARD_TEXT, "%.100s", host);
}
