/* Tensors that are lent to other workers of this host, and borrowed from them.
 *
 * A lease has a number, under which the lender keeps the memory (tensor/storage.c), and which the borrower sends back
 * when it has released the tensor. A lender that leaves in order does so after all borrowers have copied what they still
 * have; see td__membership_leave().
 *
 * A tensor that is sent back to its lender unchanged arrives there as a tensor over the memory that was lent, which it
 * keeps as one more lease: a write to it, or to the tensor that was lent, moves the written one to a copy. */
#include "rpc/lease.h"

#include "base/arena.h"
#include "base/fail.h"
#include "rpc/rpc_agent.h"

#include <sched.h>
#include <stdlib.h>

enum { MAP_MS = 5000 };

struct lent {
    struct td__map_node node;
    uint64_t number;
    int to;
    char *data;
    size_t bytes;
    struct td__lease *lease;
    struct lent *ended; /* in a list of those that have */
};

struct borrowed {
    struct borrowed *next, **before; /* in the list of all */
    uint64_t serial;                 /* of the agent */
    int from;
    uint64_t number;
    char *data;
    struct td__storage *storage; /* not retained; NULL: it is being made */
};

/* What this process has borrowed. Not the agent's: a tensor may be released while the agent ends. */
static pthread_mutex_t borrowed_lock = PTHREAD_MUTEX_INITIALIZER;
static struct borrowed *all_borrowed;

/* ---- Lending --------------------------------------------------------------------------------- */

/* Of a tensor that was sent back: the last one over it was released, or has moved. */
static void end_taken_back(void *data, void *lease)
{
    (void)data;
    td__lease_return(lease);
}

/* The lease of a tensor that was sent back. */
static struct td__lease *lease_of(td_tensor *tensor)
{
    return td__storage_borrowed_arg(tensor->storage, end_taken_back);
}

static td_status lend(td_tensor *tensor, struct td__lease **lease)
{
    if (!(*lease = lease_of(tensor)))
        return td__storage_lend(tensor->storage, lease);
    td__lease_retain(*lease);
    return TD_OK;
}

/* The place of a tensor in the default arena; false for memory that other workers cannot map. */
static bool find_place(td_tensor *tensor, uint64_t *offset)
{
    struct td__arena *arena;
    size_t at;
    if (!td__storage_is_lendable(tensor->storage) ||
        (td__storage_is_borrowed(tensor->storage) && !lease_of(tensor)) ||
        !td__arena_resolve(td_tensor_data(tensor), &arena, &at) || arena != td__arena_default())
        return false;
    *offset = at;
    return true;
}

td_status td__rpc_lend(struct td__rpc_agent *agent, int to, td_tensor **tensor, uint64_t *number,
                       uint64_t *offset)
{
    if (!find_place(*tensor, offset)) {
        td_tensor *copy = td__clone(*tensor);
        if (!copy)
            return td__error_status();
        td_tensor_release(*tensor);
        *tensor = copy;
        if (!find_place(copy, offset))
            return td_fail(TD_ERR_NOMEM, "a tensor cannot be shared: out of shareable memory");
    }
    struct lent *lent = calloc(1, sizeof *lent);
    if (!lent)
        return td__fail_nomem("rpc");
    td_status status = lend(*tensor, &lent->lease);
    if (status) {
        free(lent);
        return status;
    }
    lent->to = to;
    lent->data = td_tensor_data(*tensor);
    lent->bytes = (size_t)(*tensor)->layout.numel * td_dtype_size((*tensor)->layout.dtype);
    pthread_mutex_lock(&agent->lease_lock);
    *number = lent->number = ++agent->last_lease;
    lent->node.key = (const char *)&lent->number;
    lent->node.key_size = sizeof lent->number;
    bool added = td__map_insert(&agent->leases, &lent->node);
    pthread_mutex_unlock(&agent->lease_lock);
    if (!added) {
        td__lease_return(lent->lease);
        free(lent);
        return td__fail_nomem("rpc");
    }
    return TD_OK;
}

/* What is lent to a worker under a number; with the lock held. */
static struct lent *find_lent(struct td__rpc_agent *agent, int to, uint64_t number)
{
    struct td__map_node *node = td__map_find(&agent->leases, (const char *)&number, sizeof number);
    struct lent *lent = node ? TD__CONTAINER(node, struct lent, node) : NULL;
    return lent && lent->to == to ? lent : NULL;
}

td_status td__rpc_take_back(struct td__rpc_agent *agent, int from, uint64_t number, uint64_t offset,
                            const struct td__layout *layout, td_tensor **tensor)
{
    size_t size = (size_t)layout->numel * td_dtype_size(layout->dtype);
    struct td__lease *lease = NULL;
    char *data = NULL;
    pthread_mutex_lock(&agent->lease_lock);
    struct lent *lent = find_lent(agent, from, number);
    if (lent && offset <= lent->bytes && size <= lent->bytes - offset) {
        lease = lent->lease;
        data = lent->data + offset;
        td__lease_retain(lease);
    }
    pthread_mutex_unlock(&agent->lease_lock);
    if (!lease)
        return td_fail(TD_ERR_INVALID, "a tensor is sent back that was not lent");
    struct td__storage *storage = td__storage_borrow(td__host_device(), data, size, end_taken_back,
                                                     lease);
    if (!storage) {
        td__lease_return(lease);
        return TD_ERR_NOMEM;
    }
    *tensor = td__tensor_over(storage, 0, layout);
    td__storage_release(storage); /* the tensor has it */
    return *tensor ? TD_OK : td__fail_nomem("rpc");
}

void td__rpc_lease_end(struct td__rpc_agent *agent, int from, uint64_t number)
{
    pthread_mutex_lock(&agent->lease_lock);
    struct lent *lent = find_lent(agent, from, number);
    if (lent)
        td__map_remove(&agent->leases, &lent->node);
    pthread_mutex_unlock(&agent->lease_lock);
    if (lent)
        td__lease_return(lent->lease);
    free(lent);
}

int td__rpc_lease_count(struct td__rpc_agent *agent)
{
    pthread_mutex_lock(&agent->lease_lock);
    int count = (int)agent->leases.size;
    pthread_mutex_unlock(&agent->lease_lock);
    return count;
}

/* Takes the leases of a worker out of the map; -1: of all. */
static struct lent *take_leases(struct td__rpc_agent *agent, int from)
{
    struct lent *ended = NULL;
    struct td__map_node *node, *next;
    pthread_mutex_lock(&agent->lease_lock);
    for (node = td__map_next(&agent->leases, NULL); node; node = next) {
        struct lent *lent = TD__CONTAINER(node, struct lent, node);
        next = td__map_next(&agent->leases, node);
        if (from >= 0 && lent->to != from)
            continue;
        td__map_remove(&agent->leases, node);
        lent->ended = ended;
        ended = lent;
    }
    pthread_mutex_unlock(&agent->lease_lock);
    return ended;
}

/* The memory is freed without the lock, perhaps by a function of the program. */
void td__rpc_leases_end(struct td__rpc_agent *agent, int from)
{
    for (struct lent *ended = take_leases(agent, from), *later; ended; ended = later) {
        later = ended->ended;
        td__lease_return(ended->lease);
        free(ended);
    }
}

/* A borrower that is still there reads the memory, and its RETURN would find no agent. A list, not forgotten: they are no
 * leak. */
static struct lent *lent_for_good;

void td__rpc_leases_close(struct td__rpc_agent *agent)
{
    size_t bytes = 0;
    int count = 0;
    for (struct lent *ended = take_leases(agent, -1), *later; ended; ended = later) {
        later = ended->ended;
        if (agent->orderly || td__endpoint_presence(agent->endpoint, ended->to) != TD__PRESENT) {
            td__lease_return(ended->lease);
            free(ended);
            continue;
        }
        bytes += ended->bytes;
        count++;
        ended->ended = lent_for_good; /* by one thread at a time: that of td_rpc_shutdown() */
        lent_for_good = ended;
    }
    td__map_free(&agent->leases);
    if (count)
        td_log(TD_LOG_WARN,
               "rpc: worker \"%s\" was shut down while others read %d of its tensors: their %zu "
               "bytes stay allocated until the process ends",
               agent->name, count, bytes);
}

/* ---- Borrowing ------------------------------------------------------------------------------- */

void td__rpc_give_back(struct td__rpc_agent *agent, int from, uint64_t number)
{
    struct td__message_header header = {.kind = TD__MESSAGE_RETURN};
    struct td__message *message = td__message_create(agent, from, false);
    if (!message)
        return; /* the memory stays lent until this worker ends */
    td__buffer_put_u64(&message->bytes, number);
    if (td__message_seal(message, &header, SIZE_MAX))
        td__message_free(message);
    else
        td__agent_send(agent, from, message);
}

static void remove_borrowed(struct borrowed *borrowed)
{
    pthread_mutex_lock(&borrowed_lock);
    *borrowed->before = borrowed->next;
    if (borrowed->next)
        borrowed->next->before = borrowed->before;
    pthread_mutex_unlock(&borrowed_lock);
}

void td__rpc_unmap(struct td__rpc_agent *agent, int rank)
{
    pthread_mutex_lock(&borrowed_lock);
    const struct borrowed *borrowed = all_borrowed;
    while (borrowed && (borrowed->serial != agent->serial || borrowed->from != rank))
        borrowed = borrowed->next;
    if (!borrowed && td__endpoint_knows(agent->endpoint, rank))
        td__endpoint_unmap(agent->endpoint, rank);
    pthread_mutex_unlock(&borrowed_lock);
}

/* The last tensor over borrowed memory was released, or moved to memory of its own. */
static void end_borrowed(void *data, void *arg)
{
    struct borrowed *borrowed = arg;
    (void)data;
    remove_borrowed(borrowed);
    struct td__rpc_agent *agent = td__agent_hold();
    if (agent && agent->serial == borrowed->serial) {
        td__rpc_give_back(agent, borrowed->from, borrowed->number);
        if (td__endpoint_presence(agent->endpoint, borrowed->from) != TD__PRESENT)
            td__rpc_unmap(agent, borrowed->from);
    }
    td__agent_leave(agent);
    free(borrowed);
}

bool td__rpc_is_lent_by(struct td__rpc_agent *agent, int to, const td_tensor *tensor,
                        uint64_t *number, uint64_t *offset)
{
    bool found = false;
    pthread_mutex_lock(&borrowed_lock); /* until then it is not freed */
    const struct borrowed *borrowed = td__storage_borrowed_arg(tensor->storage, end_borrowed);
    if (borrowed && borrowed->serial == agent->serial && borrowed->from == to) {
        *number = borrowed->number;
        *offset = (uint64_t)((char *)td_tensor_data((td_tensor *)tensor) - borrowed->data);
        found = true;
    }
    pthread_mutex_unlock(&borrowed_lock);
    return found;
}

static void add_borrowed(struct borrowed *borrowed)
{
    pthread_mutex_lock(&borrowed_lock);
    borrowed->next = all_borrowed;
    borrowed->before = &all_borrowed;
    if (borrowed->next)
        borrowed->next->before = &borrowed->next;
    all_borrowed = borrowed;
    pthread_mutex_unlock(&borrowed_lock);
}

/* It is in the list before the memory is mapped, so that td__rpc_unmap() does not end the mapping meanwhile. */
static td_status map_borrowed(struct td__rpc_agent *agent, struct borrowed *borrowed,
                              uint64_t offset, const struct td__layout *layout, td_tensor **tensor)
{
    size_t size = (size_t)layout->numel * td_dtype_size(layout->dtype);
    void *data;
    add_borrowed(borrowed);
    td_status status = td__endpoint_map(agent->endpoint, borrowed->from, offset, size,
                                        td__deadline_in_ms(MAP_MS), &data);
    struct td__storage *storage = status ? NULL
                                         : td__storage_borrow(td__host_device(), data, size,
                                                              end_borrowed, borrowed);
    *tensor = storage ? td__tensor_over(storage, 0, layout) : NULL;
    if (!*tensor) {
        remove_borrowed(borrowed);
        free(storage);
        return status ? status : td__fail_nomem("rpc");
    }
    pthread_mutex_lock(&borrowed_lock);
    borrowed->data = data;
    borrowed->storage = storage;
    pthread_mutex_unlock(&borrowed_lock);
    td__storage_release(storage); /* the tensor has it */
    return TD_OK;
}

td_status td__rpc_borrow(struct td__rpc_agent *agent, int from, uint64_t number, uint64_t offset,
                         const struct td__layout *layout, td_tensor **tensor)
{
    if (from == agent->rank || !td__worker_is_near(agent, from))
        return td_fail(TD_ERR_INVALID, "a tensor is lent by a worker of another host");
    struct borrowed *borrowed = calloc(1, sizeof *borrowed);
    td_status status = borrowed ? TD_OK : td__fail_nomem("rpc");
    if (borrowed) {
        borrowed->serial = agent->serial;
        borrowed->from = from;
        borrowed->number = number;
        status = map_borrowed(agent, borrowed, offset, layout, tensor);
    }
    if (status) {
        free(borrowed);
        td__rpc_give_back(agent, from, number);
    }
    return status;
}

void td__rpc_map(struct td__rpc_agent *agent, int rank)
{
    void *address;
    if (td__endpoint_map(agent->endpoint, rank, 0, 1, td__deadline_in_ms(MAP_MS), &address))
        return; /* tried again when a tensor is borrowed */
}

/* A reference to a storage, unless it is being freed. */
static bool retain_alive(struct td__storage *storage)
{
    int owners = atomic_load(&storage->owners);
    while (owners > 0)
        if (atomic_compare_exchange_weak(&storage->owners, &owners, owners + 1))
            return true;
    return false;
}

void td__rpc_keep_borrowed(void)
{
    for (;;) {
        pthread_mutex_lock(&borrowed_lock);
        struct borrowed *first = all_borrowed;
        struct td__storage *storage = first && first->storage && retain_alive(first->storage)
                                          ? first->storage
                                          : NULL;
        pthread_mutex_unlock(&borrowed_lock);
        if (!first)
            return;
        if (!storage) {
            sched_yield(); /* another thread frees it, or makes it */
            continue;
        }
        td_status status = td__storage_unshare(storage);
        td__storage_release(storage);
        if (status)
            return; /* out of memory: the mapping stays as long as the lender's */
    }
}
