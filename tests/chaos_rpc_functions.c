/* The functions that workers of a round serve. What they get is known in advance, as the results are. */
#include "chaos_rpc.h"

#include <pthread.h>
#include <stdlib.h>

/* ---- Data ------------------------------------------------------------------------------------ */

static float element(uint64_t key, int64_t index)
{
    return (float)((key % 9973 + (uint64_t)index * 7) % 1009);
}

td_tensor *keyed_tensor(uint64_t key, int64_t count)
{
    td_tensor *tensor = td_empty(TD_SHAPE(count), TD_F32, NULL);
    float *data = tensor ? td_tensor_data(tensor) : NULL;
    for (int64_t i = 0; data && i < count; i++)
        data[i] = element(key, i);
    return tensor;
}

bool tensor_is_keyed(td_tensor *tensor, uint64_t key, int64_t count, float more)
{
    const float *data = tensor ? td_tensor_data(tensor) : NULL;
    if (!data || td_tensor_numel(tensor) != count)
        return false;
    for (int64_t i = 0; i < count; i++)
        if (data[i] != element(key, i) + more)
            return false;
    return true;
}

static int64_t int_of(const td_value *value)
{
    int64_t number = 0;
    return td_value_int(value, &number) ? 0 : number;
}

/* The rank that serves the call; and that it has begun to. */
static struct rank *serve(td_rpc_call *call)
{
    struct rank *rank = td_rpc_call_arg(call);
    rank_serves(rank, false);
    return rank;
}

/* Whether a tensor has arrived whole. */
static void check_argument(struct rank *rank, td_tensor *tensor, uint64_t key)
{
    if (!tensor_is_keyed(tensor, key, td_tensor_numel(tensor), 0))
        rank_report(rank, "a tensor of %lld elements arrived wrong, with the key %llu",
                    (long long)td_tensor_numel(tensor), (unsigned long long)key);
}

/* ---- Plain functions --------------------------------------------------------------------------- */

static td_value *add(td_rpc_call *call, td_value *const *args, int count)
{
    (void)count;
    serve(call);
    return td_value_of(int_of(args[0]) + int_of(args[1]));
}

static td_value *exchange(td_rpc_call *call, td_value *const *args, int count)
{
    (void)count;
    struct rank *rank = serve(call);
    uint64_t key = (uint64_t)int_of(args[0]);
    td_tensor *x = td_value_tensor(args[1]);
    check_argument(rank, x, key);
    return td_value_of(keyed_tensor(key + 1, td_tensor_numel(x)));
}

static td_value *in_place(td_rpc_call *call, td_value *const *args, int count)
{
    (void)count;
    struct rank *rank = serve(call);
    td_tensor *x = td_value_tensor(args[1]);
    check_argument(rank, x, (uint64_t)int_of(args[0]));
    return td_add_scalar_(x, 1) ? NULL : td_value_of(x);
}

static td_value *make(td_rpc_call *call, td_value *const *args, int count)
{
    (void)count;
    serve(call);
    return td_value_of(keyed_tensor((uint64_t)int_of(args[0]), int_of(args[1])));
}

static td_value *nap(td_rpc_call *call, td_value *const *args, int count)
{
    (void)args, (void)count;
    serve(call);
    td__sleep_ns((int64_t)NAP_MS * 1000000);
    return td_value_nil();
}

static td_value *refuse(td_rpc_call *call, td_value *const *args, int count)
{
    (void)args, (void)count;
    serve(call);
    td_fail(TD_ERR_MISMATCH, "refused on purpose");
    return NULL;
}

static td_value *hold(td_rpc_call *call, td_value *const *args, int count)
{
    bool last = false;
    (void)count;
    td_value_bool(args[0], &last);
    serve(call);
    rank_serves(td_rpc_call_arg(call), last);
    while (!td_rpc_call_is_cancelled(call))
        td__sleep_ns(1000000);
    return td_value_nil();
}

/* ---- Tensors that are kept --------------------------------------------------------------------- */

enum { SLOTS = 6 };

static struct {
    td_tensor *tensor;
    uint64_t key;
} kept[SLOTS];
static int next_slot;
static pthread_mutex_t kept_lock = PTHREAD_MUTEX_INITIALIZER;

/* Its sender has changed its own in place since. */
static td_value *keep(td_rpc_call *call, td_value *const *args, int count)
{
    (void)count;
    struct rank *rank = serve(call);
    uint64_t key = (uint64_t)int_of(args[0]);
    td_tensor *tensor = td_value_tensor(args[1]);
    check_argument(rank, tensor, key);
    pthread_mutex_lock(&kept_lock);
    int slot = next_slot++ % SLOTS;
    td_tensor *before = kept[slot].tensor;
    uint64_t before_key = kept[slot].key;
    kept[slot].tensor = td_tensor_retain(tensor);
    kept[slot].key = key;
    pthread_mutex_unlock(&kept_lock);
    if (before)
        check_argument(rank, before, before_key);
    td_tensor_release(before);
    return td_value_nil();
}

void rpc_drop_kept(void)
{
    pthread_mutex_lock(&kept_lock);
    for (int i = 0; i < SLOTS; i++) {
        td_tensor_release(kept[i].tensor);
        kept[i].tensor = NULL;
    }
    pthread_mutex_unlock(&kept_lock);
}

/* ---- Calls in calls ---------------------------------------------------------------------------- */

/* Calls the workers of the list in turn, each from the one before: their number. */
static td_value *visit(td_rpc_call *call, td_value *const *args, int count)
{
    (void)count;
    serve(call);
    int64_t at = int_of(args[1]);
    if (at == td_value_count(args[0]))
        return td_value_of(0);
    td_value *rest = td_rpc_sync(td_value_text(td_value_at(args[0], at)), "visit",
                                 TD_ARGS(args[0], at + 1), NULL);
    return rest ? td_value_of(int_of(rest) + 1) : NULL;
}

static td_value *plus_100(td_future *done, void *arg)
{
    (void)arg;
    td_value *sum = td_future_wait(done, 0);
    return sum ? td_value_of(int_of(sum) + 100) : NULL;
}

static td_value *later(td_rpc_call *call, td_value *const *args, int count)
{
    (void)count;
    serve(call);
    td_future *sum = td_rpc_async(td_value_text(args[0]), "add", TD_ARGS(args[1], 1), NULL);
    td_future *result = sum ? td_future_then(sum, plus_100, NULL) : NULL;
    return result ? td_value_of(result) : NULL;
}

/* ---- Objects ----------------------------------------------------------------------------------- */

static void *new_cell(td_rpc_call *call, td_value *const *args, int count)
{
    (void)count;
    serve(call);
    atomic_llong *cell = malloc(sizeof *cell);
    if (cell)
        atomic_init(cell, int_of(args[0]));
    return cell;
}

static td_value *cell_add(td_rpc_call *call, td_value *const *args, int count)
{
    (void)count;
    serve(call);
    int64_t n = int_of(args[0]);
    return td_value_of(atomic_fetch_add((atomic_llong *)td_rpc_call_self(call), n) + n);
}

static td_value *use_cell(td_rpc_call *call, td_value *const *args, int count)
{
    (void)count;
    serve(call);
    return td_rref_sync(td_value_rref(args[0]), "add", TD_ARGS(args[1]), NULL);
}

/* ---- Gradients --------------------------------------------------------------------------------- */

static td_value *square(td_rpc_call *call, td_value *const *args, int count)
{
    (void)count;
    serve(call);
    td_tensor *x = td_value_tensor(args[0]);
    return td_value_of(td_mul(x, x));
}

/* Twice the square, which another worker computes. */
static td_value *square_there(td_rpc_call *call, td_value *const *args, int count)
{
    (void)count;
    serve(call);
    td_value *squared = td_rpc_sync(td_value_text(args[0]), "square", TD_ARGS(args[1]), NULL);
    return squared ? td_value_of(td_mul_scalar(td_value_tensor(squared), 2)) : NULL;
}

/* ---- All of them ------------------------------------------------------------------------------- */

void rpc_register(struct rank *rank)
{
    static const struct {
        const char *signature;
        td_rpc_fn fn;
    } functions[] = {{"add(x: int, y: int)", add},
                     {"exchange(key: int, x: tensor)", exchange},
                     {"in_place(key: int, x: tensor)", in_place},
                     {"keep(key: int, x: tensor)", keep},
                     {"make(key: int, count: int)", make},
                     {"nap()", nap},
                     {"refuse()", refuse},
                     {"hold(last: bool)", hold},
                     {"visit(to: list, at: int)", visit},
                     {"later(to: text, x: int)", later},
                     {"use_cell(cell: rref, n: int)", use_cell},
                     {"square(x: tensor)", square},
                     {"square_there(to: text, x: tensor)", square_there}};
    static const td_rpc_method methods[] = {{"add(n: int)", cell_add}, {0}};
    td_rpc_class cell = {.signature = "Cell(start: int)",
                         .create = new_cell,
                         .destroy = free,
                         .methods = methods,
                         .arg = rank};
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        if (td_rpc_register(functions[i].signature, functions[i].fn, rank))
            rank_report(rank, "%s: %s", functions[i].signature, td_last_error());
    if (td_rpc_register_class(&cell))
        rank_report(rank, "%s", td_last_error());
}
