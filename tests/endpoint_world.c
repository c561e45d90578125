/* Endpoints of tests; see endpoint_world.h. */
#include "endpoint_world.h"

#include "runner.h"

#include "os/tls.h"
#include "peer/endpoint_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

td__deadline soon(void)
{
    return td__deadline_in_ms(10000 * td_test_slowness());
}

void meet_all(struct td__endpoint **endpoints, int count)
{
    struct td__buffer buffers[16] = {{0}};
    td_bytes cards[16];
    CHECK(count <= 16);
    for (int i = 0; i < count; i++) {
        td__endpoint_card(endpoints[i], &buffers[i]);
        cards[i] = (td_bytes){(char *)buffers[i].data, buffers[i].size};
    }
    for (int i = 0; i < count; i++)
        CHECK_OK(td__endpoint_connect_all(endpoints[i], cards));
    for (int i = 0; i < count; i++)
        td__buffer_free(&buffers[i]);
}

void pair_open(struct td__endpoint *endpoints[2], bool shared)
{
    setenv("TANDEM_SECRET", ENDPOINT_SECRET, 1);
    for (int i = 0; i < 2; i++)
        CHECK_OK(td__endpoint_open(i, 2, "127.0.0.1", shared, &endpoints[i]));
    meet_all(endpoints, 2);
}

void pair_close(struct td__endpoint *endpoints[2])
{
    td__endpoint_close(endpoints[0]);
    td__endpoint_close(endpoints[1]);
}

/* The third number of a card is the port; the name of the socket is the last of its texts. */
int endpoint_port(const struct td__endpoint *endpoint)
{
    struct td__buffer card = {0};
    td__endpoint_card(endpoint, &card);
    int port = (int)td__load_u32((const uint8_t *)card.data + 8);
    td__buffer_free(&card);
    return port;
}

void endpoint_local(const struct td__endpoint *endpoint, char name[128])
{
    struct td__buffer card = {0};
    td__endpoint_card(endpoint, &card);
    char *text = memmem(card.data, card.size, "unix:@", 6);
    CHECK(text);
    size_t size = (size_t)((char *)card.data + card.size - text);
    CHECK(size < 128);
    memcpy(name, text, size);
    name[size] = '\0';
    td__buffer_free(&card);
}

struct td__auth endpoint_guest(const struct td__endpoint *endpoint, const char *secret)
{
    struct td__auth auth = {.purpose = "link"};
    CHECK_OK(td__secret_load(secret, &auth.secret));
    CHECK_OK(td__secret_bind(&auth.secret, "links"));
    memcpy(auth.identity, endpoint->own.identity, sizeof auth.identity);
    return auth;
}

void check_closed(int fd)
{
    struct pollfd end = {.fd = fd, .events = POLLIN};
    char byte;
    CHECK_EQ(poll(&end, 1, 15000 * td_test_slowness()), 1);
    ssize_t got = td__sock_recv(fd, &byte, 1, MSG_DONTWAIT);
    CHECK(got == 0 || (got < 0 && errno == ECONNRESET));
    close(fd);
}

void meet_by_files(struct td__endpoint *endpoint)
{
    struct td__buffer card = {0};
    char path[300], bytes[16][1024];
    td_bytes cards[16];
    td__endpoint_card(endpoint, &card);
    snprintf(path, sizeof path, "%s/card%d", td_test_temp_dir(), td_test_rank());
    FILE *file = fopen(path, "we");
    CHECK(file && fwrite(card.data, 1, card.size, file) == card.size);
    fclose(file);
    td__buffer_free(&card);
    td_test_barrier();
    for (int i = 0; i < td_test_size(); i++) {
        snprintf(path, sizeof path, "%s/card%d", td_test_temp_dir(), i);
        CHECK((file = fopen(path, "re")));
        cards[i] = (td_bytes){bytes[i], fread(bytes[i], 1, sizeof bytes[i], file)};
        fclose(file);
    }
    CHECK_OK(td__endpoint_connect_all(endpoint, cards));
}

void *map_file(size_t size)
{
    char path[300];
    snprintf(path, sizeof path, "%s/shared", td_test_temp_dir());
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    CHECK(fd >= 0);
    CHECK_EQ(ftruncate(fd, (off_t)size), 0);
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(memory != MAP_FAILED);
    close(fd);
    return memory;
}
