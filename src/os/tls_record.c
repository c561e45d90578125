/* The records of TLS 1.3, RFC 8446, 5 and 7; see tls.h.
 *
 *     | 23 | 3 | 3 | length (2 bytes) | text and the type of what is in it, encrypted | tag |
 *
 * The nonce is the number of the record. Keys are renewed by a KeyUpdate, after which the next record of that direction
 * is under the next keys.
 *
 * **Sending.** Up to BATCH records are encrypted into a buffer and sent by one call. What the socket does not take
 * stays there. The caller is told that all of it but its last byte is sent: so it comes again, as it does when a socket
 * takes a part only, and the buffer is sent then. Nothing waits in memory when the caller has sent all.
 *
 * **Receiving.** As many bytes are taken out of the kernel's buffer as records have whose text the caller has room for,
 * and are decrypted to where it wants them. What follows the last whole record is kept until the rest has arrived.
 *
 * A record of which the caller wants a part is kept decrypted, and its last bytes stay in the kernel's buffer: poll()
 * goes on to report it. After one, the next is looked at before it is taken out. */
#include "os/tls_internal.h"

#include "base/buffer.h"
#include "base/fail.h"
#include "base/thread.h"
#include "os/address.h"
#include "os/socket.h"

#include <errno.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <stdlib.h>
#include <string.h>

enum {
    /* Records that are sent by one call. Fewer of them make shorter steps for the receiver to follow, but were slower: a
     * broadcast of 1 MiB between two hosts took 7 % longer with 16, and 20 % with 8; with 64 as long. */
    BATCH = 32,
    SMALL = 4 << 10,
    SCRATCH = 8 * TD__TLS_RECORD,
    KEY_UPDATE = 24,
    CLOSE_NOTIFY = 0,
    BAD_RECORD = 20,
};

uint64_t td__tls_key_limit = (uint64_t)64 << 30;

static size_t min_size(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* ---- Keys ------------------------------------------------------------------------------------ */

/* HKDF-Expand-Label with an empty context; `size` is at most that of one block. */
static bool expand(const uint8_t secret[TD__TLS_SECRET], const char *label, uint8_t *to,
                   size_t size)
{
    uint8_t info[64], block[TD__TLS_SECRET];
    size_t length = strlen(label);
    info[0] = 0;
    info[1] = (uint8_t)size;
    info[2] = (uint8_t)(6 + length);
    memcpy(info + 3, "tls13 ", 6);
    memcpy(info + 9, label, length);
    info[9 + length] = 0;
    info[10 + length] = 1;
    unsigned made = sizeof block;
    bool right = HMAC(EVP_sha256(), secret, TD__TLS_SECRET, info, 11 + length, block, &made);
    memcpy(to, block, size);
    OPENSSL_cleanse(block, sizeof block);
    return right;
}

bool td__tls_set_keys(struct td__tls_keys *keys, const uint8_t secret[TD__TLS_SECRET])
{
    uint8_t key[TD__GCM_KEY];
    memmove(keys->secret, secret, TD__TLS_SECRET);
    keys->number = keys->bytes = 0;
    keys->renewable = false;
    td__gcm_free(&keys->gcm);
    bool right = expand(keys->secret, "key", key, sizeof key) &&
                 expand(keys->secret, "iv", keys->iv, sizeof keys->iv) &&
                 td__gcm_init(&keys->gcm, TD__GCM_BEST, key);
    OPENSSL_cleanse(key, sizeof key);
    return right;
}

static bool renew(struct td__tls_keys *keys)
{
    uint8_t next[TD__TLS_SECRET];
    bool right = expand(keys->secret, "traffic upd", next, sizeof next) &&
                 td__tls_set_keys(keys, next);
    OPENSSL_cleanse(next, sizeof next);
    return right;
}

static struct td__gcm_record next_record(struct td__tls_keys *keys, const uint8_t *header)
{
    struct td__gcm_record record = {.header = header};
    memcpy(record.nonce, keys->iv, sizeof record.nonce);
    for (int i = 0; i < 8; i++)
        record.nonce[4 + i] ^= (uint8_t)(keys->number >> (56 - 8 * i));
    keys->number++;
    return record;
}

/* ---- Parts of the caller's memory ------------------------------------------------------------ */

struct cursor {
    const struct iovec *parts;
    size_t count, at; /* the next byte of parts[0] */
};

static void skip_empty(struct cursor *cursor)
{
    while (cursor->count && cursor->at == cursor->parts->iov_len) {
        cursor->parts++;
        cursor->count--;
        cursor->at = 0;
    }
}

/* The next contiguous bytes. */
static size_t next_part(struct cursor *cursor, uint8_t **bytes)
{
    skip_empty(cursor);
    if (!cursor->count)
        return 0;
    *bytes = (uint8_t *)cursor->parts->iov_base + cursor->at;
    return cursor->parts->iov_len - cursor->at;
}

static bool has_room(struct cursor *cursor)
{
    skip_empty(cursor);
    return cursor->count;
}

/* Copies up to `size` bytes between `data` and the caller's memory; data NULL: moves on only. */
static size_t move_bytes(struct cursor *cursor, uint8_t *data, size_t size, bool to_caller)
{
    size_t done = 0, part;
    uint8_t *bytes;
    while (done < size && (part = next_part(cursor, &bytes))) {
        part = min_size(part, size - done);
        if (data && to_caller)
            memcpy(bytes, data + done, part);
        else if (data)
            memcpy(data + done, bytes, part);
        cursor->at += part;
        done += part;
    }
    return done;
}

static size_t total_size(const struct iovec *parts, size_t count)
{
    size_t total = 0;
    for (size_t i = 0; i < count; i++)
        total += parts[i].iov_len;
    return total;
}

/* ---- Sending: all under the lock of sending -------------------------------------------------- */

static bool seal(struct td__tls *tls, uint8_t type, const uint8_t *text, size_t size)
{
    uint8_t *header = tls->wire + tls->wire_to;
    size_t length = size + 1 + TD__GCM_TAG;
    header[0] = TD__TLS_DATA;
    header[1] = header[2] = 3;
    header[3] = (uint8_t)(length >> 8);
    header[4] = (uint8_t)length;
    struct td__gcm_record record = next_record(&tls->out, header);
    tls->out.bytes += size;
    tls->wire_to += TD__TLS_HEADER + length;
    return td__gcm_seal(&tls->out.gcm, &record, text, size, type, header + TD__TLS_HEADER);
}

/* TD__TLS_RECORD has some bytes more than a record that is sent: there is room for a header and a KeyUpdate, too. */
static bool reserve_wire(struct td__tls *tls, size_t size)
{
    size_t room = size <= SMALL ? SMALL : min_size(size / TD__TLS_TEXT + 1, BATCH) * TD__TLS_RECORD;
    if (tls->wire_room >= room)
        return true;
    uint8_t *wire = realloc(tls->wire, room);
    if (!wire)
        return false;
    tls->wire = wire;
    tls->wire_room = room;
    return true;
}

static bool send_key_update(struct td__tls *tls)
{
    static const uint8_t update[] = {KEY_UPDATE, 0, 0, 1, 0};
    return seal(tls, TD__TLS_HANDSHAKE, update, sizeof update) && renew(&tls->out);
}

/* Encrypts the next bytes of the caller; returns how many, or 0. */
static size_t fill_wire(struct td__tls *tls, struct cursor *cursor, size_t left)
{
    uint8_t gathered[TD__TLS_TEXT], *bytes = NULL;
    size_t done = 0;
    if (!reserve_wire(tls, left + 3 * TD__TLS_OVERHEAD))
        return 0;
    bool old = tls->out.bytes >= td__tls_key_limit || tls->out.number >= TD__TLS_KEY_RECORDS ||
               tls->out.renewable;
    if (old && !send_key_update(tls))
        return 0;
    while (done < left) {
        size_t size = min_size(left - done, TD__TLS_TEXT);
        size_t part = next_part(cursor, &bytes);
        if (part < SMALL &&
            left - done > TD__TLS_TEXT) /* a header: what follows is not copied then */
            size = min_size(size, part);
        if (size + TD__TLS_OVERHEAD > tls->wire_room - tls->wire_to)
            break;
        if (part >= size) {
            cursor->at += size;
        } else {
            bytes = gathered;
            move_bytes(cursor, gathered, size, false);
        }
        if (!seal(tls, TD__TLS_DATA, bytes, size))
            return 0;
        done += size;
    }
    return done;
}

/* 0: all that is in the buffer is sent; or an errno. */
static int flush_wire(struct td__tls *tls)
{
    while (tls->wire_at < tls->wire_to) {
        ssize_t sent = send(tls->fd, tls->wire + tls->wire_at, tls->wire_to - tls->wire_at,
                            MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent < 0)
            return errno;
        tls->wire_at += (size_t)sent;
    }
    tls->wire_at = tls->wire_to = 0;
    return 0;
}

static ssize_t send_parts(struct td__tls *tls, const struct iovec *parts, size_t count)
{
    struct cursor cursor = {.parts = parts, .count = count};
    size_t total = total_size(parts, count), done = 0;
    if (tls->said_end)
        return errno = EPIPE, -1;
    if (!atomic_load_explicit(&tls->open, memory_order_acquire))
        return errno = ENOTCONN, -1;
    int error = flush_wire(tls);
    if (!error && tls->held) {
        done = move_bytes(&cursor, NULL, min_size(tls->held, total), false);
        tls->held -= done;
    }
    while (!error && done < total) {
        size_t batch = fill_wire(tls, &cursor, total - done);
        if (!batch) { /* no memory: what may be in the buffer has used up numbers of records */
            tls->said_end = true;
            return errno = ENOMEM, -1;
        }
        error = flush_wire(tls);
        done += batch;
        if (error) {
            tls->held = 1;
            done--;
        }
    }
    if (done || !error)
        return (ssize_t)done;
    return errno = error, -1;
}

ssize_t td__tls_send(struct td__tls *tls, const struct iovec *parts, size_t count)
{
    if (tls->fork_generation != td__fork_generation())
        return errno = EBADF, -1;
    pthread_mutex_lock(&tls->send_lock);
    ssize_t sent = send_parts(tls, parts, count);
    int error = errno;
    pthread_mutex_unlock(&tls->send_lock);
    errno = error;
    return sent;
}

void td__tls_say_end(struct td__tls *tls, bool changed)
{
    uint8_t alert[2] = {changed ? 2 : 1, changed ? BAD_RECORD : CLOSE_NOTIFY};
    if (tls->fork_generation != td__fork_generation() || !atomic_load(&tls->open))
        return;
    pthread_mutex_lock(&tls->send_lock);
    if (!tls->said_end && !flush_wire(tls) && reserve_wire(tls, SMALL) &&
        seal(tls, TD__TLS_ALERT, alert, sizeof alert))
        flush_wire(tls);
    tls->said_end = true;
    pthread_mutex_unlock(&tls->send_lock);
}

/* ---- Receiving: all under the lock of receiving ---------------------------------------------- */

static void tell_of_changes(struct td__tls *tls, const char *what)
{
    struct td__address peer;
    char where[TD__ADDRESS_TEXT];
    atomic_store(&tls->changed, true);
    td__remote_address(tls->fd, &peer);
    td_log(TD_LOG_WARN,
           "the connection with %s is cut off: TLS found that bytes were changed on the way (%s)",
           td__address_text(&peer, where), what);
}

static int fail_changed(struct td__tls *tls, const char *what)
{
    tell_of_changes(tls, what);
    td__tls_say_end(tls, true);
    shutdown(tls->fd, SHUT_RDWR);
    return EBADMSG;
}

/* Memory of this thread for what it decrypts next. */
static pthread_key_t scratch_key;

static void make_scratch_key(void)
{
    pthread_key_create(&scratch_key, free);
}

static uint8_t *scratch_of_thread(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make_scratch_key);
    uint8_t *scratch = pthread_getspecific(scratch_key);
    if (!scratch && (scratch = malloc(SCRATCH)) && pthread_setspecific(scratch_key, scratch)) {
        free(scratch);
        scratch = NULL;
    }
    return scratch;
}

/* Removes bytes that were peeked at from the kernel's buffer; TCP does not copy them. There are at most SCRATCH. */
static void discard(const struct td__tls *tls, size_t size)
{
    while (size) {
        ssize_t gone = recv(tls->fd, scratch_of_thread(), size, MSG_TRUNC | MSG_DONTWAIT);
        if (gone > 0)
            size -= (size_t)gone;
        else if (gone == 0 || errno != EINTR)
            return;
    }
}

/* What is in a record that has no data of the caller. 0, or an errno. */
static int take_control(struct td__tls *tls, uint8_t type, const uint8_t *text, size_t size)
{
    if (type == TD__TLS_ALERT && size == 2 && text[1] == CLOSE_NOTIFY) {
        tls->ended = true;
        return 0;
    }
    if (type == TD__TLS_ALERT && size == 2) {
        tell_of_changes(tls, "the other side has found it");
        shutdown(tls->fd, SHUT_RDWR);
        return EBADMSG;
    }
    bool update = type == TD__TLS_HANDSHAKE && size == 5 && text[0] == KEY_UPDATE && !text[1] &&
                  !text[2] && text[3] == 1 && text[4] <= 1;
    if (!update)
        return fail_changed(tls, "unexpected record");
    if (text[4]) {
        pthread_mutex_lock(&tls->send_lock);
        tls->out.renewable = true;
        pthread_mutex_unlock(&tls->send_lock);
    }
    return renew(&tls->in) ? 0 : ENOMEM;
}

/* The length of a record without its header, and of its text with padding. */
static size_t padded_text(size_t length)
{
    return length - 1 - TD__GCM_TAG;
}

/* Decrypts the record at `header` to `to`. *data gets how much of it is of the caller's. */
static int decrypt(struct td__tls *tls, const uint8_t *header, size_t length, uint8_t *to,
                   size_t *data)
{
    size_t size = padded_text(length);
    uint8_t type;
    struct td__gcm_record record = next_record(&tls->in, header);
    *data = 0;
    if (!td__gcm_open(&tls->in.gcm, &record, header + TD__TLS_HEADER, size, &type, to))
        return fail_changed(tls, "bad record mac");
    while (!type && size) /* padding */
        type = to[--size];
    if (size > TD__TLS_TEXT)
        return fail_changed(tls, "data length too long");
    if (type != TD__TLS_DATA)
        return take_control(tls, type, to, size);
    *data = size;
    return 0;
}

/* A record that is not in the kernel's buffer any more, and for all of whose data the caller has room. */
static int take_record(struct td__tls *tls, uint8_t *header, size_t length, struct cursor *cursor,
                       size_t *done)
{
    uint8_t *to = NULL;
    size_t data, size = padded_text(length);
    bool direct = size && next_part(cursor, &to) >= size;
    int error = decrypt(tls, header, length, direct ? to : header + TD__TLS_HEADER, &data);
    if (direct)
        cursor->at += data;
    else
        move_bytes(cursor, header + TD__TLS_HEADER, data, true);
    *done += data;
    return error;
}

/* A record of which `wire` bytes are in the kernel's buffer still: decrypted to the caller's memory if that has room for
 * it in one piece, else to tls->text. */
static int open_record(struct td__tls *tls, const uint8_t *header, size_t length, size_t wire,
                       struct cursor *cursor, bool peek, size_t *done)
{
    size_t size = padded_text(length);
    uint8_t *to = NULL;
    bool direct = !peek && size && next_part(cursor, &to) >= size;
    if (!direct && !tls->text)
        tls->text = malloc(TD__TLS_TEXT + 256);
    if (!direct)
        to = tls->text;
    if (!to)
        return ENOMEM;
    int error = decrypt(tls, header, length, to, &size);
    if (direct) {
        tls->in_parts = false;
        cursor->at += size;
        *done += size;
    } else if (size) {
        tls->in_parts = true;
        tls->text_at = 0;
        tls->text_to = size;
        tls->text_wire = wire;
    }
    return error;
}

/* The length of a record with this header; 0 where it is none. */
static size_t length_of(const uint8_t *header)
{
    size_t length = (size_t)header[3] << 8 | header[4];
    bool right = header[0] == TD__TLS_DATA && header[1] == 3 && header[2] == 3 &&
                 length > TD__GCM_TAG && length <= TD__TLS_RECORD - TD__TLS_HEADER;
    return right ? length : 0;
}

static void keep_part(struct td__tls *tls, const uint8_t *bytes, size_t size)
{
    memcpy(tls->part, bytes, size);
    tls->part_size = size;
}

/* Decrypts the `size` bytes at the front of the kernel's buffer, which are at `bytes`, as far as they are whole records
 * and the caller has room. The beginning of another record is taken out, too. */
static int open_records(struct td__tls *tls, const uint8_t *bytes, size_t size,
                        struct cursor *cursor, bool peek, size_t *done)
{
    size_t at = 0;
    int error = 0;
    while (!error && !tls->text_wire && !tls->ended && at < size && has_room(cursor)) {
        size_t left = size - at, length = left < TD__TLS_HEADER ? 0 : length_of(bytes + at);
        if (left >= TD__TLS_HEADER && !length) {
            error = fail_changed(tls, "wrong version number");
        } else if (!length || left < TD__TLS_HEADER + length) {
            keep_part(tls, bytes + at, left);
            at = size;
        } else {
            length += TD__TLS_HEADER;
            error = open_record(tls, bytes + at, length - TD__TLS_HEADER, length, cursor, peek,
                                done);
            at += tls->text_wire ? 0 : length;
        }
    }
    discard(tls, at);
    return error;
}

/* Looks for the rest of a record whose beginning was taken out. */
static int complete_part(struct td__tls *tls, struct cursor *cursor, bool peek, size_t *done)
{
    size_t header = tls->part_size < TD__TLS_HEADER ? TD__TLS_HEADER : 0;
    size_t length = header ? 0 : length_of(tls->part);
    if (!header && !length)
        return fail_changed(tls, "wrong version number");
    size_t missing = (header ? header : TD__TLS_HEADER + length) - tls->part_size;
    ssize_t got = recv(tls->fd, tls->part + tls->part_size, missing, MSG_PEEK | MSG_DONTWAIT);
    if (got <= 0)
        return got ? errno : ECONNRESET;
    if (header || (size_t)got < missing) {
        discard(tls, (size_t)got);
        tls->part_size += (size_t)got;
        return 0;
    }
    tls->part_size = 0;
    int error = open_record(tls, tls->part, length, missing, cursor, peek, done);
    if (!tls->text_wire)
        discard(tls, missing);
    return error;
}

/* The bytes of records that have `text` bytes of text: there is no more text in so many bytes, in whatever records. */
static size_t wire_of(size_t text)
{
    return text + (text + TD__TLS_TEXT - 1) / TD__TLS_TEXT * TD__TLS_OVERHEAD;
}

/* Takes records out of the kernel's buffer, the first of which may have begun in tls->part. */
static int take_records(struct td__tls *tls, uint8_t *scratch, struct cursor *cursor, size_t left,
                        size_t *done)
{
    size_t length = tls->part_size ? length_of(tls->part) : 0;
    size_t missing = length ? TD__TLS_HEADER + length - tls->part_size : 0;
    size_t text = length ? padded_text(length) : 0;
    size_t more = wire_of(min_size(left - text, SCRATCH / TD__TLS_RECORD * TD__TLS_TEXT)), at = 0;
    struct iovec parts[2] = {{tls->part + tls->part_size, missing}, {scratch, more}};
    struct msghdr message = {.msg_iov = parts + !missing, .msg_iovlen = missing ? 2 : 1};
    ssize_t got = recvmsg(tls->fd, &message, MSG_DONTWAIT);
    if (got <= 0)
        return got ? errno : length ? ECONNRESET : ENODATA;
    size_t size = (size_t)got;
    bool all = size < missing + more;
    if (size < missing) {
        tls->part_size += size;
        return 0;
    }
    size -= missing;
    tls->part_size = 0;
    int error = length ? take_record(tls, tls->part, length, cursor, done) : 0;
    while (!error && !tls->ended && at < size) {
        size_t rest = size - at;
        length = rest < TD__TLS_HEADER ? 0 : length_of(scratch + at);
        if (rest >= TD__TLS_HEADER && !length)
            return fail_changed(tls, "wrong version number");
        if (!length || rest < TD__TLS_HEADER + length) {
            keep_part(tls, scratch + at, rest);
            break;
        }
        error = take_record(tls, scratch + at, length, cursor, done);
        at += TD__TLS_HEADER + length;
    }
    return error ? error : all && *done ? EAGAIN : 0;
}

/* Hands out what of the first record is decrypted already. */
static size_t take_text(struct td__tls *tls, struct cursor *cursor, bool peek)
{
    size_t taken = move_bytes(cursor, tls->text + tls->text_at, tls->text_to - tls->text_at, true);
    if (peek)
        return taken;
    tls->text_at += taken;
    if (tls->text_at == tls->text_to) {
        discard(tls, tls->text_wire);
        tls->text_wire = 0;
    }
    return taken;
}

/* One look into the kernel's buffer. 0: another one may find more; or an errno, ENODATA for the end. */
static int look(struct td__tls *tls, struct cursor *cursor, size_t left, bool peek, size_t *done)
{
    uint8_t *scratch = scratch_of_thread();
    if (!tls->part)
        tls->part = malloc(TD__TLS_RECORD);
    if (!scratch || !tls->part)
        return ENOMEM;
    size_t begun = tls->part_size < TD__TLS_HEADER ? 0 : length_of(tls->part);
    bool fits = tls->part_size ? begun && padded_text(begun) <= left : !tls->in_parts;
    if (fits && !peek)
        return take_records(tls, scratch, cursor, left, done);
    if (tls->part_size)
        return complete_part(tls, cursor, peek, done);
    size_t wanted = min_size(left + (left / TD__TLS_TEXT + 1) * TD__TLS_OVERHEAD, SCRATCH);
    if (wanted < TD__TLS_RECORD)
        wanted = TD__TLS_RECORD;
    ssize_t got = recv(tls->fd, scratch, wanted, MSG_PEEK | MSG_DONTWAIT);
    if (got <= 0)
        return got ? errno : ENODATA;
    int error = open_records(tls, scratch, (size_t)got, cursor, peek, done);
    bool all = (size_t)got < wanted && !tls->text_wire && *done;
    return error ? error : all ? EAGAIN : 0;
}

static ssize_t recv_parts(struct td__tls *tls, const struct iovec *parts, size_t count, bool peek)
{
    struct cursor cursor = {.parts = parts, .count = count};
    size_t total = total_size(parts, count), done = 0;
    struct td__tls_failure failure;
    int error = 0, shaken = atomic_load(&tls->open) ? 1 : td__tls_shake(tls, &failure);
    if (shaken <= 0)
        return errno = shaken ? ECONNRESET : EAGAIN, -1;
    if (atomic_load(&tls->changed))
        return errno = EBADMSG, -1;
    while (!error && done < total) {
        if (tls->text_wire) {
            done += take_text(tls, &cursor, peek);
            if (peek)
                break;
        } else if (tls->ended) {
            error = ENODATA;
        } else {
            error = look(tls, &cursor, total - done, peek, &done);
        }
    }
    if (done || !total || error == ENODATA)
        return (ssize_t)done;
    return errno = error, -1;
}

ssize_t td__tls_recv(struct td__tls *tls, const struct iovec *parts, size_t count, bool peek)
{
    if (tls->fork_generation != td__fork_generation())
        return errno = EBADF, -1;
    pthread_mutex_lock(&tls->recv_lock);
    ssize_t got = recv_parts(tls, parts, count, peek);
    int error = errno;
    pthread_mutex_unlock(&tls->recv_lock);
    errno = error;
    return got;
}
