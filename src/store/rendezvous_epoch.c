/* Meetings counted by place; see rendezvous_epoch.h. */
#include "store/rendezvous_epoch.h"

#include "base/map.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

struct place {
    struct td__map_node node;
    unsigned meetings;
    char name[];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct td__map places;

static struct place *find(const char *name) /* holds the lock */
{
    struct td__map_node *node = td__map_find(&places, name, strlen(name));
    return node ? TD__CONTAINER(node, struct place, node) : NULL;
}

unsigned td__rendezvous_epoch(const char *name)
{
    pthread_mutex_lock(&lock);
    struct place *place = find(name);
    unsigned meetings = place ? place->meetings : 0;
    pthread_mutex_unlock(&lock);
    return meetings;
}

void td__rendezvous_epoch_done(const char *name)
{
    pthread_mutex_lock(&lock);
    struct place *place = find(name);
    if (!place && (place = calloc(1, sizeof *place + strlen(name) + 1))) {
        strcpy(place->name, name);
        place->node = (struct td__map_node){.key = place->name, .key_size = strlen(name)};
        if (!td__map_insert(&places, &place->node)) {
            free(place);
            place = NULL;
        }
    }
    if (place) /* without memory for this the next meeting here fails, which tells enough */
        place->meetings++;
    pthread_mutex_unlock(&lock);
}
