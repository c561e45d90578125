/* The job's secret, and the proof of it that opens every connection.
 *
 *     client                                            server
 *     hello:     magic, nonce_c, MAC(hello, nonce_c)  ->  wrong: sends a refusal of four bytes, and closes
 *                                                   <-  challenge: nonce_s, MAC(server, both nonces)
 *     proof:     MAC(client, both nonces)             ->  wrong: closes
 *
 * Each MAC is HMAC-SHA-256 under the secret over a label, the purpose of the connection ("store",
 * …), the identity of the intended server, and the nonces. A hello without the secret, or for another
 * server, costs the server one HMAC and gets only the refusal; a replayed hello gets a challenge that its
 * sender cannot answer. After a refusal the client does not retry. After a close without refusal it does:
 * proxies close connections while their server has not started. The refusal is not authenticated: an
 * attacker that can forge it can also cut the connection. The client may send its first request together
 * with the proof.
 *
 * A job without a secret uses a key that is derived from its user's own secret (user_secret.c) and the address
 * of the server; with TANDEM_INSECURE=1 the handshake is the same under an empty key, so that a side with a
 * secret and a side without reject each other.
 *
 * With TANDEM_TLS=1 TLS follows the proof, under a key that only the two sides of this handshake can derive.
 * The setting is covered by the MACs of hello and challenge: an attacker on the path cannot disable TLS, and
 * each side detects that the other's setting differs.
 *
 * These are pure functions; os/trust.h does the I/O. */
#ifndef TD_BASE_AUTH_H
#define TD_BASE_AUTH_H

#include <tandem/base.h>

enum {
    TD__NONCE_SIZE = 32,
    TD__MAC_SIZE = 32,
    TD__MAGIC_SIZE = 4, /* at the start of every hello */
    TD__HELLO_SIZE = TD__MAGIC_SIZE + TD__NONCE_SIZE + TD__MAC_SIZE,
    TD__CHALLENGE_SIZE = TD__NONCE_SIZE + TD__MAC_SIZE,
    TD__PROOF_SIZE = TD__MAC_SIZE,
    TD__REFUSAL_SIZE = 4,
    TD__IDENTITY_SIZE = 16,
};

struct td__secret {
    bool given;
    bool tls;                  /* TCP connections are encrypted */
    bool insecure;             /* no secret is required beyond this host */
    bool bound;                /* the key is final */
    const char *origin;        /* NULL, or where an adopted secret is from, for messages */
    uint8_t key[TD__MAC_SIZE]; /* derived from the text; from an empty one without a secret */
};

/** Reads the secret from `text`, or if that is NULL from TANDEM_SECRET, or if that is not set from the file
 *  that TANDEM_SECRET_FILE names; without any of them, or with an empty text, `given` is false. TANDEM_TLS and
 *  TANDEM_INSECURE are 0 or 1; anything else is TD_ERR_INVALID. A secret that is not given, without
 *  TANDEM_INSECURE=1, is not bound yet. */
td_status td__secret_load(const char *text, struct td__secret *secret);

/** Binds a secret that is not bound yet: derives its key from the user's own secret, which is created on first
 *  use, and `context`, a text that both sides know: an address, or the purpose of the connections.
 *  TD_ERR_AUTH, with TANDEM_SECRET as the remedy: no HOME, a file that cannot be created, or one that other
 *  users can read. */
td_status td__secret_bind(struct td__secret *secret, const char *context);

/** The secret of a job that all processes derive alike, as text: from the user's own secret and `context`, which names
 *  the job. For jobs whose hosts share the home directory. TD_ERR_AUTH as above. */
td_status td__secret_of_job(const char *context, char text[65]);

/** The secret of this process's job from now on, where neither TANDEM_SECRET nor TANDEM_SECRET_FILE is set: as if the
 *  variable had it, but no program that is started gets it. `origin` is a static string for messages. */
td_status td__secret_adopt(const char *text, const char *origin);

/** Derives the key for `context` from the `size` bytes of a user's secret; for td__secret_bind(). */
void td__secret_derive(struct td__secret *secret, const uint8_t *bytes, size_t size,
                       const char *context);

/** A fresh secret as hexadecimal text for the environment of a job. */
td_status td__secret_make(char text[65]);

/** One side of one handshake. */
struct td__auth {
    struct td__secret secret;
    const char *purpose; /* outlives this struct */
    /* Of the intended server; zeros where there is one server a purpose. */
    uint8_t identity[TD__IDENTITY_SIZE];
    bool tls;       /* TLS follows the proof */
    bool other_tls; /* a check failed only because the other side's `tls` differs */
    uint8_t client_nonce[TD__NONCE_SIZE];
    uint8_t server_nonce[TD__NONCE_SIZE];
};

td_status td__auth_hello(struct td__auth *client, uint8_t hello[TD__HELLO_SIZE]);

/** Whether a hello can begin with these bytes: rejects most other clients before any HMAC. */
bool td__auth_may_be_hello(const uint8_t bytes[TD__MAGIC_SIZE]);

bool td__auth_check_hello(struct td__auth *server, const uint8_t hello[TD__HELLO_SIZE]);

/** What a server sends after a wrong hello, before it closes the connection. A challenge may begin with the
 *  same bytes, but is longer. */
void td__auth_refusal(uint8_t refusal[TD__REFUSAL_SIZE]);
bool td__auth_is_refusal(const uint8_t bytes[TD__REFUSAL_SIZE]);

td_status td__auth_challenge(struct td__auth *server, uint8_t challenge[TD__CHALLENGE_SIZE]);
bool td__auth_check_challenge(struct td__auth *client, const uint8_t challenge[TD__CHALLENGE_SIZE]);
void td__auth_proof(const struct td__auth *client, uint8_t proof[TD__PROOF_SIZE]);
bool td__auth_check_proof(const struct td__auth *server, const uint8_t proof[TD__PROOF_SIZE]);

/** The session key after the handshake; both sides derive the same one. */
void td__auth_key(const struct td__auth *auth, uint8_t key[TD__MAC_SIZE]);

/** Fills `bytes` from the kernel's random generator. */
td_status td__random(void *bytes, size_t size);

#endif
