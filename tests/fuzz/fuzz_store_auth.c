/* The handshake from both sides. The input is a byte, a secret (up to a zero byte), and then, as
 * the first byte says:
 *
 *     0, 1, 2     a hello, a challenge, a proof, from a client without the secret
 *     otherwise   what is changed in a handshake that is right: a bit there is flipped for each
 *                 that is set here. It must be refused exactly when there are such. */
#include "fuzz.h"

#include "base/auth.h"

#include <stdlib.h>
#include <string.h>

static void check(bool condition)
{
    if (!condition)
        abort();
}

static bool xor_into(uint8_t *to, size_t room, const uint8_t **from, size_t *size)
{
    size_t count = *size < room ? *size : room;
    bool changed = false;
    for (size_t i = 0; i < count; i++) {
        to[i] ^= (*from)[i];
        changed |= (*from)[i] != 0;
    }
    *from += count;
    *size -= count;
    return changed;
}

static void shake_hands(const struct td__secret *secret, const uint8_t *data, size_t size)
{
    struct td__auth client = {.secret = *secret, .purpose = "store", .identity = {1}},
                    server = client;
    uint8_t hello[TD__HELLO_SIZE], challenge[TD__CHALLENGE_SIZE], proof[TD__PROOF_SIZE];
    check(!td__auth_hello(&client, hello));
    bool changed = xor_into(hello, sizeof hello, &data, &size);
    check(td__auth_check_hello(&server, hello) == !changed);
    if (changed)
        return;
    check(!td__auth_challenge(&server, challenge));
    changed = xor_into(challenge, sizeof challenge, &data, &size);
    check(td__auth_check_challenge(&client, challenge) == !changed);
    if (changed)
        return;
    td__auth_proof(&client, proof);
    changed = xor_into(proof, sizeof proof, &data, &size);
    check(td__auth_check_proof(&server, proof) == !changed);
}

/* Bytes that were made without the secret are refused: the chance of another outcome is nil. */
static void refuse(const struct td__secret *secret, uint8_t what, const uint8_t *data, size_t size)
{
    struct td__auth auth = {.secret = *secret, .purpose = "store"};
    size_t needed = what == 0 ? TD__HELLO_SIZE : what == 1 ? TD__CHALLENGE_SIZE : TD__PROOF_SIZE;
    uint8_t *bytes = calloc(1, needed); /* of exactly its size, for the sanitizer */
    memcpy(bytes, data, size < needed ? size : needed);
    if (what == 0)
        check(!td__auth_check_hello(&auth, bytes));
    else if (what == 1)
        check(!td__auth_check_challenge(&auth, bytes));
    else
        check(!td__auth_check_proof(&auth, bytes));
    free(bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char text[256] = "";
    struct td__secret secret;
    if (size < 2)
        return 0;
    uint8_t what = *data++;
    const uint8_t *end = memchr(data, 0, --size);
    size_t length = end ? (size_t)(end - data) : size;
    memcpy(text, data, length < sizeof text ? length : sizeof text - 1);
    data += length;
    size -= length;
    if (size) {
        data++;
        size--;
    }
    check(!td__secret_load(text, &secret));
    check(secret.given == (text[0] != '\0'));
    if (what < 3)
        refuse(&secret, what, data, size);
    else
        shake_hands(&secret, data, size);
    return 0;
}
