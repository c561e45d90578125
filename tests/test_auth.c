/* The job's secret and the handshake that proves it. */
#include "runner.h"

#include "base/auth.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static struct td__auth side(const char *secret, const char *purpose)
{
    struct td__auth auth = {.purpose = purpose};
    CHECK_OK(td__secret_load(secret, &auth.secret));
    return auth;
}

/* Changes one byte of one message on its way. */
struct tamper {
    int message; /* 0 hello, 1 challenge, 2 proof; -1 none */
    size_t byte;
};

enum outcome { AGREED, HELLO_REFUSED, CHALLENGE_REFUSED, PROOF_REFUSED };

static enum outcome shake_hands(struct td__auth *client, struct td__auth *server,
                                struct tamper tamper)
{
    uint8_t hello[TD__HELLO_SIZE], challenge[TD__CHALLENGE_SIZE], proof[TD__PROOF_SIZE];
    CHECK_OK(td__auth_hello(client, hello));
    if (tamper.message == 0)
        hello[tamper.byte] ^= 1;
    if (!td__auth_check_hello(server, hello))
        return HELLO_REFUSED;
    CHECK_OK(td__auth_challenge(server, challenge));
    if (tamper.message == 1)
        challenge[tamper.byte] ^= 0x80;
    if (!td__auth_check_challenge(client, challenge))
        return CHALLENGE_REFUSED;
    td__auth_proof(client, proof);
    if (tamper.message == 2)
        proof[tamper.byte] ^= 0x10;
    return td__auth_check_proof(server, proof) ? AGREED : PROOF_REFUSED;
}

static const struct tamper untampered = {.message = -1};

TEST(auth_same_secret)
{
    struct td__auth client = side("secret", "store"), server = side("secret", "store");
    CHECK(client.secret.given);
    for (int i = 0; i < 3; i++)
        CHECK_EQ(shake_hands(&client, &server, untampered), AGREED);
    client = side("", "store");
    server = side(NULL, "store");
    CHECK(!client.secret.given && !server.secret.given);
    CHECK_EQ(shake_hands(&client, &server, untampered), AGREED); /* none on both sides */
}

TEST(auth_other_secret)
{
    static const char *const secrets[][2] = {
        {"one", "two"}, {"one", "one "}, {"one", "ONE"}, {"one", ""}, {"", "one"}};
    for (size_t i = 0; i < sizeof secrets / sizeof *secrets; i++) {
        struct td__auth client = side(secrets[i][0], "store"),
                        server = side(secrets[i][1], "store");
        CHECK_EQ(shake_hands(&client, &server, untampered), HELLO_REFUSED);
    }
    /* A server that takes any hello still cannot prove itself, … */
    struct td__auth client = side("one", "store"), server = side("two", "store");
    uint8_t hello[TD__HELLO_SIZE], challenge[TD__CHALLENGE_SIZE], proof[TD__PROOF_SIZE];
    CHECK_OK(td__auth_hello(&client, hello));
    td__auth_check_hello(&server, hello);
    CHECK_OK(td__auth_challenge(&server, challenge));
    CHECK(!td__auth_check_challenge(&client, challenge));
    /* … and a client that takes any challenge cannot either. */
    CHECK_OK(td__auth_hello(&client, hello));
    server = side("one", "store");
    CHECK(td__auth_check_hello(&server, hello));
    CHECK_OK(td__auth_challenge(&server, challenge));
    CHECK(td__auth_check_challenge(&client, challenge));
    CHECK_OK(td__secret_load("two", &client.secret));
    td__auth_proof(&client, proof);
    CHECK(!td__auth_check_proof(&server, proof));
}

TEST(auth_other_purpose)
{
    struct td__auth client = side("secret", "store"), server = side("secret", "rpc");
    CHECK_EQ(shake_hands(&client, &server, untampered), HELLO_REFUSED);
    server.purpose = "stor";
    CHECK_EQ(shake_hands(&client, &server, untampered), HELLO_REFUSED);
    server.purpose = "store";
    CHECK_EQ(shake_hands(&client, &server, untampered), AGREED);
}

TEST(auth_other_identity)
{
    struct td__auth client = side("secret", "link"), server = client;
    client.identity[TD__IDENTITY_SIZE - 1] = 1;
    CHECK_EQ(shake_hands(&client, &server, untampered), HELLO_REFUSED);
    server.identity[0] = 1;
    CHECK_EQ(shake_hands(&client, &server, untampered), HELLO_REFUSED);
    memcpy(server.identity, client.identity, TD__IDENTITY_SIZE);
    CHECK_EQ(shake_hands(&client, &server, untampered), AGREED);
    /* A server that takes any hello still proves only its own. */
    uint8_t hello[TD__HELLO_SIZE], challenge[TD__CHALLENGE_SIZE];
    server.identity[0] = 1;
    CHECK_OK(td__auth_hello(&client, hello));
    CHECK(!td__auth_check_hello(&server, hello));
    CHECK_OK(td__auth_challenge(&server, challenge));
    CHECK(!td__auth_check_challenge(&client, challenge));
    CHECK(!client.other_tls);
}

TEST(auth_every_byte_counts)
{
    static const size_t sizes[] = {TD__HELLO_SIZE, TD__CHALLENGE_SIZE, TD__PROOF_SIZE};
    static const enum outcome outcomes[] = {HELLO_REFUSED, CHALLENGE_REFUSED, PROOF_REFUSED};
    struct td__auth client = side("secret", "store"), server = side("secret", "store");
    for (int message = 0; message < 3; message++)
        for (size_t byte = 0; byte < sizes[message]; byte++)
            CHECK_EQ(shake_hands(&client, &server, (struct tamper){message, byte}),
                     outcomes[message]);
}

TEST(auth_messages_cannot_be_used_again)
{
    struct td__auth client = side("secret", "store"), server = side("secret", "store");
    uint8_t hello[TD__HELLO_SIZE], challenge[TD__CHALLENGE_SIZE], proof[TD__PROOF_SIZE];
    uint8_t second[TD__HELLO_SIZE], later[TD__CHALLENGE_SIZE];
    CHECK_OK(td__auth_hello(&client, hello));
    CHECK(td__auth_check_hello(&server, hello));
    CHECK_OK(td__auth_challenge(&server, challenge));
    CHECK(td__auth_check_challenge(&client, challenge));
    td__auth_proof(&client, proof);
    CHECK(td__auth_check_proof(&server, proof));

    /* The recorded hello and proof, sent to a server that chooses another nonce. */
    struct td__auth next = side("secret", "store");
    CHECK(td__auth_check_hello(&next, hello));
    CHECK_OK(td__auth_challenge(&next, later));
    CHECK(memcmp(challenge, later, TD__NONCE_SIZE) != 0);
    CHECK(!td__auth_check_proof(&next, proof));
    /* The server's own proof sent back to it. */
    CHECK(!td__auth_check_proof(&next, later + TD__NONCE_SIZE));
    CHECK(!td__auth_check_proof(&next, hello + TD__HELLO_SIZE - TD__MAC_SIZE));
    /* The recorded challenge, for a client with another nonce. */
    CHECK_OK(td__auth_hello(&client, second));
    CHECK(memcmp(hello, second, sizeof hello) != 0);
    CHECK(!td__auth_check_challenge(&client, challenge));
}

/* ---- Where the secret comes from ------------------------------------------------------------- */

static const char *write_bytes(const char *name, const void *bytes, size_t size)
{
    static char path[512];
    snprintf(path, sizeof path, "%s/%s", td_test_temp_dir(), name);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    CHECK(fd >= 0);
    CHECK_EQ(write(fd, bytes, size), size);
    close(fd);
    return path;
}

static const char *write_file(const char *name, const char *text)
{
    return write_bytes(name, text, strlen(text));
}

static bool same_key(const struct td__secret *a, const char *text)
{
    struct td__secret b;
    CHECK_OK(td__secret_load(text, &b));
    return a->given == b.given && !memcmp(a->key, b.key, sizeof a->key);
}

TEST(secret_sources)
{
    struct td__secret secret;
    CHECK_OK(td__secret_load(NULL, &secret));
    CHECK(!secret.given);
    CHECK(same_key(&secret, ""));

    setenv("TANDEM_SECRET", "from env", 1);
    CHECK_OK(td__secret_load(NULL, &secret));
    CHECK(secret.given && same_key(&secret, "from env"));
    CHECK(!same_key(&secret, "from elsewhere"));
    CHECK_OK(td__secret_load("argument", &secret)); /* goes before the environment */
    CHECK(same_key(&secret, "argument"));

    setenv("TANDEM_SECRET_FILE", write_file("secret", "from file\n"), 1);
    CHECK_OK(td__secret_load(NULL, &secret));
    CHECK(same_key(&secret, "from env")); /* the variable goes before the file */
    setenv("TANDEM_SECRET", "", 1);
    CHECK_OK(td__secret_load(NULL, &secret));
    CHECK(secret.given && same_key(&secret, "from file")); /* without its line end */
    unsetenv("TANDEM_SECRET");
    CHECK_OK(td__secret_load(NULL, &secret));
    CHECK(same_key(&secret, "from file"));
    write_file("secret", "from file \r\n\n");
    CHECK_OK(td__secret_load(NULL, &secret));
    CHECK(same_key(&secret, "from file"));
    write_file("secret", " two words");
    CHECK_OK(td__secret_load(NULL, &secret));
    CHECK(same_key(&secret, " two words"));
    setenv("TANDEM_SECRET_FILE", "", 1);
    CHECK_OK(td__secret_load(NULL, &secret));
    CHECK(!secret.given);
}

TEST(secret_files_that_are_wrong)
{
    struct td__secret secret = {.given = true};
    const char *path = write_file("empty", "\n \n");
    setenv("TANDEM_SECRET_FILE", path, 1);
    CHECK_FAILS(td__secret_load(NULL, &secret), TD_ERR_AUTH, path);
    CHECK_CONTAINS(td_last_error(), "empty");
    char missing[600];
    snprintf(missing, sizeof missing, "%s/missing", td_test_temp_dir());
    setenv("TANDEM_SECRET_FILE", missing, 1);
    CHECK_FAILS(td__secret_load(NULL, &secret), TD_ERR_AUTH, missing);
    CHECK_CONTAINS(td_last_error(), "No such file");
    setenv("TANDEM_SECRET_FILE", td_test_temp_dir(), 1);
    CHECK_FAILS(td__secret_load(NULL, &secret), TD_ERR_AUTH, td_test_temp_dir());
    CHECK_CONTAINS(td_last_error(), "is not a regular file");
    char pipe[600];
    snprintf(pipe, sizeof pipe, "%s/pipe", td_test_temp_dir());
    CHECK_EQ(mkfifo(pipe, 0600), 0);
    setenv("TANDEM_SECRET_FILE", pipe, 1);
    CHECK_FAILS(td__secret_load(NULL, &secret), TD_ERR_AUTH, "pipe is not a regular file");
    setenv("TANDEM_SECRET_FILE", "/dev/zero", 1);
    CHECK_FAILS(td__secret_load(NULL, &secret), TD_ERR_AUTH, "is not a regular file");

    char *large = malloc(4098);
    memset(large, 's', 4097);
    large[4097] = '\0';
    setenv("TANDEM_SECRET_FILE", write_file("large", large), 1);
    CHECK_FAILS(td__secret_load(NULL, &secret), TD_ERR_AUTH, "4096");
    large[4096] = '\0';
    write_file("large", large);
    CHECK_OK(td__secret_load(NULL, &secret));
    CHECK(same_key(&secret, large));
    free(large);
}

/* Any bytes make a secret, but for the one that ends a text. */
TEST(secret_files_without_nul)
{
    static const char *const wrong[] = {"\0secret", "sec\0ret", "secret\0", "secre\0\n"};
    struct td__secret secret = {.given = true};
    uint8_t all[255];
    for (size_t i = 0; i < 4; i++) {
        setenv("TANDEM_SECRET_FILE", write_bytes("nul", wrong[i], 7), 1);
        CHECK_FAILS(td__secret_load(NULL, &secret), TD_ERR_AUTH,
                    "contains a NUL byte; a secret is text");
    }
    for (int i = 0; i < 255; i++)
        all[i] = (uint8_t)(i + 1);
    write_bytes("nul", all, sizeof all);
    CHECK_OK(td__secret_load(NULL, &secret));
    CHECK(secret.given && !same_key(&secret, "secret"));
}

static void remember_line(td_log_level level, const char *line, void *arg)
{
    (void)level;
    snprintf(arg, 1024, "%s", line);
}

TEST(a_readable_secret_file_is_warned_of)
{
    struct td__secret secret;
    char line[1024] = "";
    td_log_set_sink(remember_line, line);
    const char *path = write_file("secret", "x");
    setenv("TANDEM_SECRET_FILE", path, 1);
    CHECK_OK(td__secret_load(NULL, &secret));
    CHECK_STR(line, "");
    CHECK_EQ(chmod(path, 0644), 0);
    CHECK_OK(td__secret_load(NULL, &secret));
    CHECK_CONTAINS(line, path);
    CHECK_CONTAINS(line, "chmod 600");
    CHECK(secret.given);
    td_log_set_sink(NULL, NULL);
}

/* As Kubernetes mounts secrets for a user that is not root: a group of the user's may read the file. */
TEST(a_secret_file_of_root_and_a_group)
{
    struct td__secret secret;
    char line[1024] = "";
    if (geteuid() != 0)
        td_test_skip("only root can give a file away");
    td_log_set_sink(remember_line, line);
    const char *path = write_file("secret", "x");
    setenv("TANDEM_SECRET_FILE", path, 1);
    CHECK_EQ(chmod(td_test_temp_dir(), 0711), 0);
    CHECK_EQ(chown(path, 0, 1234), 0);
    CHECK_EQ(chmod(path, 0440), 0);
    CHECK_EQ(setegid(1234), 0);
    CHECK_EQ(seteuid(1234), 0);
    CHECK_OK(td__secret_load(NULL, &secret));
    CHECK_STR(line, "");
    CHECK_EQ(seteuid(0), 0);
    CHECK_EQ(chmod(path, 0444), 0); /* others may read it, too */
    CHECK_EQ(seteuid(1234), 0);
    CHECK_OK(td__secret_load(NULL, &secret));
    CHECK_CONTAINS(line, "can be read by other users");
    CHECK_EQ(seteuid(0), 0);
    td_log_set_sink(NULL, NULL);
}

TEST(secrets_are_random)
{
    char one[65], two[65];
    CHECK_OK(td__secret_make(one));
    CHECK_OK(td__secret_make(two));
    CHECK_EQ(strlen(one), 64);
    CHECK_EQ(strspn(one, "0123456789abcdef"), 64);
    CHECK(strcmp(one, two) != 0);
    uint8_t bytes[600] = {0}, more[600] = {0};
    CHECK_OK(td__random(bytes, sizeof bytes));
    CHECK_OK(td__random(more, sizeof more));
    CHECK(memcmp(bytes, more, sizeof bytes) != 0);
    CHECK_OK(td__random(NULL, 0));
}
