/* A hash map from byte strings to structs that embed a td__map_node. The map owns neither the nodes
 * nor their keys: the struct that embeds the node owns both. */
#ifndef TD_BASE_MAP_H
#define TD_BASE_MAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** FNV-1a of `size` bytes: continues `hash`, which is TD__HASH_START at first. */
#define TD__HASH_START UINT64_C(14695981039346656037)
static inline uint64_t td__hash(uint64_t hash, const void *data, size_t size)
{
    for (const unsigned char *at = data, *end = at + size; at < end; at++)
        hash = (hash ^ *at) * UINT64_C(1099511628211);
    return hash;
}

struct td__map_node {
    struct td__map_node *next; /* in its chain */
    uint64_t hash;
    const char *key;
    size_t key_size;
};

struct td__map {
    struct td__map_node **chains;
    size_t chain_count; /* a power of two, or 0 */
    size_t size;
    uint64_t seed;
};

/** Frees the chains; the caller owns the nodes. An all-zero map is empty and valid. */
void td__map_free(struct td__map *map);

struct td__map_node *td__map_find(const struct td__map *map, const char *key, size_t key_size);

/** Inserts a node whose key and key_size are set and not in the map yet; false without memory. */
bool td__map_insert(struct td__map *map, struct td__map_node *node);

void td__map_remove(struct td__map *map, struct td__map_node *node);

/** Iterates: the first node for NULL, then the one after `node`; NULL at the end. `node` may be removed after
 *  the call that returned its successor. */
struct td__map_node *td__map_next(const struct td__map *map, const struct td__map_node *node);

/** The struct of type `type` that embeds `node` as its member `member`. */
#define TD__CONTAINER(node, type, member) ((type *)((char *)(node)-offsetof(type, member)))

#endif
