/* A hash map with chaining; the chains are doubled when there are as many nodes. */
#include "base/map.h"

#include <stdlib.h>
#include <string.h>

enum { FIRST_CHAINS = 16 };

/* FNV-1a with a seed for each map and a final mix, since the low bits choose the chain. */
static uint64_t hash_bytes(uint64_t seed, const char *key, size_t size)
{
    uint64_t hash = td__hash(TD__HASH_START ^ seed, key, size);
    hash ^= hash >> 32;
    hash *= 0xd6e8feb86659fd93u;
    return hash ^ hash >> 32;
}

static struct td__map_node **chain_of(const struct td__map *map, uint64_t hash)
{
    return &map->chains[hash & (map->chain_count - 1)];
}

static bool grow(struct td__map *map)
{
    size_t count = map->chain_count ? map->chain_count * 2 : FIRST_CHAINS;
    struct td__map_node **chains = calloc(count, sizeof *chains);
    if (!chains)
        return false;
    if (!map->chain_count)
        map->seed = (uint64_t)(uintptr_t)chains;
    for (size_t i = 0; i < map->chain_count; i++) {
        for (struct td__map_node *node = map->chains[i], *next; node; node = next) {
            next = node->next;
            struct td__map_node **chain = &chains[node->hash & (count - 1)];
            node->next = *chain;
            *chain = node;
        }
    }
    free(map->chains);
    map->chains = chains;
    map->chain_count = count;
    return true;
}

void td__map_free(struct td__map *map)
{
    free(map->chains);
    *map = (struct td__map){0};
}

struct td__map_node *td__map_find(const struct td__map *map, const char *key, size_t key_size)
{
    if (!map->size)
        return NULL;
    uint64_t hash = hash_bytes(map->seed, key, key_size);
    for (struct td__map_node *node = *chain_of(map, hash); node; node = node->next)
        if (node->hash == hash && node->key_size == key_size && !memcmp(node->key, key, key_size))
            return node;
    return NULL;
}

bool td__map_insert(struct td__map *map, struct td__map_node *node)
{
    if (map->size >= map->chain_count && !grow(map) && !map->chain_count)
        return false;
    node->hash = hash_bytes(map->seed, node->key, node->key_size);
    struct td__map_node **chain = chain_of(map, node->hash);
    node->next = *chain;
    *chain = node;
    map->size++;
    return true;
}

void td__map_remove(struct td__map *map, struct td__map_node *node)
{
    struct td__map_node **link = chain_of(map, node->hash);
    while (*link != node)
        link = &(*link)->next;
    *link = node->next;
    map->size--;
}

struct td__map_node *td__map_next(const struct td__map *map, const struct td__map_node *node)
{
    if (node && node->next)
        return node->next;
    size_t i = node ? (node->hash & (map->chain_count - 1)) + 1 : 0;
    for (; i < map->chain_count; i++)
        if (map->chains[i])
            return map->chains[i];
    return NULL;
}
