/* See p2p_worlds.h. */
#include "p2p_worlds.h"

#include <string.h>

bool world_is_tcp(void)
{
    const char *transport = getenv("TANDEM_TRANSPORT");
    return transport && !strcmp(transport, "tcp");
}

void world_begin(void)
{
    CHECK_OK(td_init_process_group(&(td_init_options){.timeout_ms = 30000}));
}

void world_end(void)
{
    CHECK_OK(td_group_barrier(NULL, NULL));
    CHECK_OK(td_destroy_process_group());
}

void *world_memory(size_t size, bool arena)
{
    void *memory = arena ? td_alloc(size ? size : 1) : malloc(size ? size : 1);
    CHECK(memory);
    return memory;
}

void world_free(void *memory, bool arena)
{
    if (arena)
        td_free(memory);
    else
        free(memory);
}

static unsigned byte_at(size_t i, unsigned seed)
{
    return (unsigned)(i * 31 + (i >> 8) * 7 + (i >> 16) * 13 + seed * 101 + 1) & 0xff;
}

void fill(unsigned char *data, size_t size, unsigned seed)
{
    for (size_t i = 0; i < size; i++)
        data[i] = (unsigned char)byte_at(i, seed);
}

void check_filled(const unsigned char *data, size_t size, unsigned seed)
{
    for (size_t i = 0; i < size; i++)
        if (data[i] != byte_at(i, seed))
            FAIL("byte %zu of %zu is %u, not %u", i, size, data[i], byte_at(i, seed));
}

void send_int(int value, int to, int tag)
{
    CHECK_OK(td_group_send(&value, 1, TD_I32, to, tag, NULL, NULL));
}

int recv_int(int from, int tag)
{
    int value = -1;
    CHECK_OK(td_group_recv(&value, 1, TD_I32, from, tag, NULL, NULL));
    return value;
}
