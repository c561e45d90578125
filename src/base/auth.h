/* The job's secret, and the proof of it that opens every connection.
 *
 *     client                                            server
 *     hello:     magic, nonce_c, MAC(hello, nonce_c)  ->  wrong: a refusal, four bytes, and closes
 *                                                   <-  challenge: nonce_s, MAC(server, both nonces)
 *     proof:     MAC(client, both nonces)             ->  wrong: closes
 *
 * Each MAC is HMAC-SHA-256 under the secret over a label, the purpose of the connection ("store",
 * …), the identity of the server that is meant, and the nonces. A hello without the secret, or for another
 * server, costs the server one HMAC and gets nothing but the refusal; a replayed hello gets a challenge that
 * its sender cannot answer. The refusal tells the client not to try again. A connection that is closed without
 * it does not: proxies close connections while their server has not started. The refusal proves nothing, and
 * need not: an attacker that can forge it can as well cut the connection. The client may send its first
 * request together with the proof.
 *
 * A job without a secret uses a key that is derived from its user's own secret (user_secret.c) and the address
 * of the server; with TANDEM_INSECURE=1 the same messages are exchanged under an empty key, so that a side
 * with a secret and a side without refuse each other.
 *
 * Where the job asks for TLS (TANDEM_TLS=1) it follows the proof, under a key that only the two sides of this
 * handshake can form. Whether it follows is part of what the hello and the challenge prove: an attacker on the
 * path cannot disable it, and each side notices that the other has another setting.
 *
 * These are pure functions; os/trust.h sends the messages. */
#ifndef TD_BASE_AUTH_H
#define TD_BASE_AUTH_H

#include <tandem/base.h>

enum {
    TD__NONCE_SIZE = 32,
    TD__MAC_SIZE = 32,
    TD__MAGIC_SIZE = 4, /* what every hello begins with */
    TD__HELLO_SIZE = TD__MAGIC_SIZE + TD__NONCE_SIZE + TD__MAC_SIZE,
    TD__CHALLENGE_SIZE = TD__NONCE_SIZE + TD__MAC_SIZE,
    TD__PROOF_SIZE = TD__MAC_SIZE,
    TD__REFUSAL_SIZE = 4,
    TD__IDENTITY_SIZE = 16,
};

struct td__secret {
    bool given;
    bool tls;                  /* what goes over TCP is to be encrypted */
    bool insecure;             /* none is needed beyond this host */
    bool bound;                /* the key is final: nothing is derived any more */
    uint8_t key[TD__MAC_SIZE]; /* derived from the text; of an empty text when there is none */
};

/** Takes the secret from `text`, or where that is NULL from TANDEM_SECRET, or where that is not set
 *  from the file that TANDEM_SECRET_FILE names; none of them: a secret that is not `given`. An empty
 *  text is none, too. TANDEM_TLS and TANDEM_INSECURE are 0 or 1; anything else is TD_ERR_INVALID. A secret
 *  that is neither given nor needless (TANDEM_INSECURE=1) is not bound yet. */
td_status td__secret_load(const char *text, struct td__secret *secret);

/** Binds a secret that is not bound yet: derives its key from the user's own secret, which is made on first use,
 *  and `context`, a text that is the same for both sides: an address, or what the connections are for.
 *  TD_ERR_AUTH, which names TANDEM_SECRET as the way out: no HOME, a file that cannot be made, or one that
 *  others could know. */
td_status td__secret_bind(struct td__secret *secret, const char *context);

/** The key for `context` out of the `size` bytes of a user's secret; for td__secret_bind(). */
void td__secret_derive(struct td__secret *secret, const uint8_t *bytes, size_t size,
                       const char *context);

/** A fresh secret as hexadecimal text for the environment of a job. */
td_status td__secret_make(char text[65]);

/** One side of one handshake. */
struct td__auth {
    struct td__secret secret;
    const char *purpose; /* a string that lives as long as this */
    /* Of the server that is meant; zeros where it is the only one of its purpose. */
    uint8_t identity[TD__IDENTITY_SIZE];
    bool tls;       /* it follows behind the proof */
    bool other_tls; /* a check failed only because the other side has another setting of it */
    uint8_t client_nonce[TD__NONCE_SIZE];
    uint8_t server_nonce[TD__NONCE_SIZE];
};

td_status td__auth_hello(struct td__auth *client, uint8_t hello[TD__HELLO_SIZE]);

/** Whether a hello can begin with these bytes: they reject most other clients at no cost. */
bool td__auth_may_be_hello(const uint8_t bytes[TD__MAGIC_SIZE]);

bool td__auth_check_hello(struct td__auth *server, const uint8_t hello[TD__HELLO_SIZE]);

/** What a server answers to a wrong hello, before it closes the connection. A challenge that begins like it goes
 *  on. */
void td__auth_refusal(uint8_t refusal[TD__REFUSAL_SIZE]);
bool td__auth_is_refusal(const uint8_t bytes[TD__REFUSAL_SIZE]);

td_status td__auth_challenge(struct td__auth *server, uint8_t challenge[TD__CHALLENGE_SIZE]);
bool td__auth_check_challenge(struct td__auth *client, const uint8_t challenge[TD__CHALLENGE_SIZE]);
void td__auth_proof(const struct td__auth *client, uint8_t proof[TD__PROOF_SIZE]);
bool td__auth_check_proof(const struct td__auth *server, const uint8_t proof[TD__PROOF_SIZE]);

/** The key for what follows the handshake; both sides form the same, once the proof was right. */
void td__auth_key(const struct td__auth *auth, uint8_t key[TD__MAC_SIZE]);

/** Fills `bytes` with random ones. */
td_status td__random(void *bytes, size_t size);

#endif
