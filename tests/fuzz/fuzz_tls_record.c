/* Records of TLS as another side sends them: with any bytes, and with any text under the right keys.
 *
 * The first byte says how the bytes come and how they are taken. Then follow pieces: a byte for the kind (raw bytes, or the
 * type of a record that is sealed here), one for the size, and the bytes. */
#include "fuzz.h"
#include "memory_socket.h"

#include "base/thread.h"
#include "os/tls_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 1 << 16 };

static void check(bool right)
{
    if (!right)
        abort();
}

static void silent(td_log_level level, const char *line, void *arg)
{
    (void)level, (void)line, (void)arg;
}

static size_t seal(struct td__tls_keys *keys, const uint8_t *text, size_t size, uint8_t type,
                   uint8_t *out)
{
    size_t length = size + 1 + TD__GCM_TAG;
    const uint8_t header[TD__TLS_HEADER] = {TD__TLS_DATA, 3, 3, (uint8_t)(length >> 8),
                                            (uint8_t)length};
    struct td__gcm_record record = {.header = header};
    memcpy(out, header, sizeof header);
    memcpy(record.nonce, keys->iv, sizeof record.nonce);
    record.nonce[11] ^= (uint8_t)keys->number++;
    check(td__gcm_seal(&keys->gcm, &record, text, size, type, out + sizeof header));
    return sizeof header + length;
}

static size_t make_stream(struct td__tls_keys *keys, const uint8_t *data, size_t size,
                          uint8_t *stream)
{
    size_t total = 0;
    while (size >= 2) {
        uint8_t kind = data[0];
        size_t part = data[1] < size - 2 ? data[1] : size - 2;
        if (total + part + TD__TLS_OVERHEAD > MOST || keys->number == 255)
            break;
        if (kind == 0)
            memcpy(stream + total, data + 2, part);
        total += kind ? seal(keys, data + 2, part, kind - 1, stream + total) : part;
        data += 2 + part;
        size -= 2 + part;
    }
    return total;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const uint8_t secret[TD__TLS_SECRET] = "known to the target";
    static uint8_t stream[MOST], got[MOST];
    static struct td__tls tls;
    if (!size)
        return 0;
    td_log_set_sink(silent, NULL);
    memset(&tls, 0, sizeof tls);
    pthread_mutex_init(&tls.recv_lock, NULL);
    pthread_mutex_init(&tls.send_lock, NULL);
    check(td__tls_set_keys(&tls.in, secret) && td__tls_set_keys(&tls.out, secret));
    size_t total = make_stream(&tls.out, data + 1, size - 1, stream);
    check(td__tls_set_keys(&tls.out, secret));
    atomic_store(&tls.open, true);
    tls.fork_generation = td__fork_generation();
    tls.fd = memory_socket(stream, total, data[0] & 15);
    memory_socket_end(tls.fd);
    size_t most = 1 + (size_t)(data[0] >> 4) * 97, all = 0;
    for (int quiet = 0; quiet < 3 && all < MOST;) {
        struct iovec parts[2] = {{got, most / 3}, {got + most / 3, most - most / 3}};
        uint8_t peeked;
        struct iovec one = {&peeked, 1};
        bool seen = td__tls_recv(&tls, &one, 1, true) == 1;
        ssize_t now = td__tls_recv(&tls, parts, 2, false);
        check(now <= (ssize_t)most && (!seen || (now > 0 && got[0] == peeked)));
        quiet = now > 0 ? 0 : quiet + 1;
        all += now > 0 ? (size_t)now : 0;
    }
    check(all <= total);
    td__gcm_free(&tls.in.gcm);
    td__gcm_free(&tls.out.gcm);
    free(tls.text);
    free(tls.part);
    free(tls.wire);
    memory_socket_reset();
    return 0;
}
