/* How often this process has completed a rendezvous, by address; see rendezvous_schemes.h. */
#include "base/map.h"
#include "store/rendezvous_schemes.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

struct counted {
    struct td__map_node node;
    unsigned epoch;
    char address[];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct td__map epochs;

static struct counted *find(const char *address) /* holds the lock */
{
    struct td__map_node *node = td__map_find(&epochs, address, strlen(address));
    return node ? TD__CONTAINER(node, struct counted, node) : NULL;
}

unsigned td__rendezvous_epoch(const char *address)
{
    pthread_mutex_lock(&lock);
    struct counted *entry = find(address);
    unsigned epoch = entry ? entry->epoch : 0;
    pthread_mutex_unlock(&lock);
    return epoch;
}

void td__rendezvous_epoch_done(const char *address)
{
    pthread_mutex_lock(&lock);
    struct counted *entry = find(address);
    if (!entry && (entry = calloc(1, sizeof *entry + strlen(address) + 1))) {
        strcpy(entry->address, address);
        entry->node = (struct td__map_node){.key = entry->address, .key_size = strlen(address)};
        if (!td__map_insert(&epochs, &entry->node)) {
            free(entry);
            entry = NULL;
        }
    }
    if (entry) /* without memory the next rendezvous at this address fails */
        entry->epoch++;
    pthread_mutex_unlock(&lock);
}
