/* The cards of ranks, as an endpoint reads them out of the store when the world is made.
 *
 *     byte 0    bits 0 and 1: how many ranks there are, less one; bits 2 and 3: which of them reads; bit 4: it
 *               uses TLS
 *     then      for each rank: control, length, that many bytes
 *
 *     control   even: the bytes are the card; odd: they are the fields of a card that is made of them,
 *               and whose last bytes (as many as the upper bits of control say) are cut off or added */
#include "fuzz.h"

#include "peer/endpoint_internal.h"

#include <stdlib.h>
#include <string.h>

enum { MOST = 4 };

static void check(bool condition)
{
    if (!condition)
        abort();
}

/* Text out of the input: a length byte, and that many bytes. */
static void take_text(struct td__reader *reader, char text[TD__CARD_TEXT])
{
    size_t left = (size_t)(reader->end - reader->at);
    size_t length = left ? td__reader_u8(reader) % TD__CARD_TEXT : 0;
    left -= left > 0;
    length = length < left ? length : left;
    memcpy(text, reader->at, length);
    reader->at += length;
    text[length] = 0;
}

/* A card as a rank would write it. */
static void write_card(const uint8_t *data, size_t size, struct td__buffer *card)
{
    struct td__endpoint endpoint = {.size = 1};
    struct td__reader reader = td__reader_of(data, size);
    struct td__card *own = &endpoint.own;
    own->pid = td__reader_u8(&reader);
    own->port = td__reader_u8(&reader) << 8 | td__reader_u8(&reader);
    own->number = (uint32_t)own->port << 16 | (uint32_t)own->pid;
    endpoint.shared = own->port & 1;
    own->tls = own->port & 2;
    own->pid_space = td__reader_u8(&reader);
    memset(own->identity, (int)own->pid_space, sizeof own->identity);
    reader.failed = false;
    take_text(&reader, own->host_id);
    take_text(&reader, own->host_name);
    take_text(&reader, own->address);
    take_text(&reader, own->local);
    td__endpoint_card(&endpoint, card);
}

/* In memory of exactly its size, for the sanitizer. */
static td_bytes make_card(uint8_t control, const uint8_t *data, size_t size)
{
    struct td__buffer card = {0};
    td_bytes bytes;
    if (control & 1) {
        write_card(data, size, &card);
        size_t change = control >> 2 & 15;
        if (control & 2)
            td__buffer_put(&card, "more and more bytes", change);
        else
            card.size -= change < card.size ? change : card.size;
    } else {
        td__buffer_put(&card, data, size);
    }
    bytes.size = card.size;
    bytes.data = malloc(card.size ? card.size : 1);
    if (card.size)
        memcpy(bytes.data, card.data, card.size);
    td__buffer_free(&card);
    return bytes;
}

static void check_peers(const struct td__endpoint *endpoint)
{
    int hosts = 0;
    for (int r = 0; r < endpoint->size; r++) {
        const struct td__card *peer = td__peer(endpoint, r);
        check(strlen(peer->host_id) < TD__CARD_TEXT && strlen(peer->host_name) < TD__CARD_TEXT);
        check(strlen(peer->address) < TD__CARD_TEXT && strlen(peer->local) < TD__CARD_TEXT);
        check(peer->port >= 0 && peer->port <= 65535);
        check(peer->tls == endpoint->own.tls);
        check(peer->host >= 0 && peer->host <= hosts); /* numbered in the order of their ranks */
        hosts += peer->host == hosts;
        check(strlen(td__endpoint_describe(endpoint, r)) > 0);
        for (int s = 0; s < r; s++) {
            const struct td__card *other = td__peer(endpoint, s);
            bool same = peer->shared && other->shared && !strcmp(peer->host_id, other->host_id);
            check((peer->host == other->host) == same);
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    td_bytes cards[MOST];
    struct td__endpoint endpoint = {.lock = PTHREAD_MUTEX_INITIALIZER};
    if (size < 1)
        return 0;
    endpoint.size = endpoint.capacity = 1 + (data[0] & 3);
    endpoint.rank = (data[0] >> 2 & 3) % endpoint.size;
    endpoint.own.tls = data[0] >> 4 & 1;
    endpoint.peers = calloc(MOST, sizeof *endpoint.peers);
    size_t at = 1;
    for (int r = 0; r < endpoint.size; r++) {
        uint8_t control = at < size ? data[at++] : 0;
        size_t length = at < size ? data[at++] : 0;
        length = length < size - at ? length : size - at;
        cards[r] = make_card(control, data + at, length);
        at += length;
    }
    td_status status = td__endpoint_connect_all(&endpoint, cards);
    if (status)
        check(status == TD_ERR_MISMATCH && (strstr(td_last_error(), "is not valid for rank") ||
                                            strstr(td_last_error(), "TANDEM_TLS is")));
    else
        check_peers(&endpoint);
    td__cards_free(&endpoint);
    for (int r = 0; r < endpoint.size; r++)
        free(cards[r].data);
    return 0;
}
