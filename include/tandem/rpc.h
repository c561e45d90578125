/* Remote procedure calls between workers, which are processes with a name.
 *
 *     td_value *add(td_rpc_call *call, td_value *const *args, int count)
 *     {
 *         return td_value_from_tensor(td_add(td_value_tensor(args[0]), td_value_tensor(args[1])));
 *     }
 *
 *     td_rpc_register("add(x: tensor, y: tensor)", add, NULL);                on all workers
 *     td_init_rpc("a", &(td_rpc_options){.rank = 0, .world_size = 2});        on the other: "b", rank 1
 *     td_value *sum = td_rpc_sync("b", "add", TD_ARGS(x, y), NULL);           runs add() on "b"
 *     td_rpc_shutdown(NULL);
 *
 * Only functions that a worker has registered can be called: no code crosses the wire. Arguments and results are
 * values (value.h). Between workers of one host, a call goes through shared memory, and a tensor by reference: the
 * receiver maps the memory of the sender (see «Tensors» below).
 *
 * A process has at most one worker. It may also be in process groups (group.h), and both may be used at once.
 *
 * Errors. A call that fails returns NULL (or a td_status), and td_last_error() names the worker. The status is that
 * of the function which failed, or TD_ERR_TIMEOUT, TD_ERR_PEER (the worker has ended or left), TD_ERR_INVALID
 * (unknown worker or function, or arguments that do not fit), TD_ERR_ABORTED (cancelled), TD_ERR_STATE (not
 * initialized, or shut down).
 *
 * Threads. Every function may be called from any thread, also in functions that serve calls. td_init_rpc() and
 * td_rpc_shutdown() are called by one thread at a time. */
#ifndef TANDEM_RPC_H
#define TANDEM_RPC_H

#include <tandem/rendezvous.h>
#include <tandem/value.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Workers ------------------------------------------------------------------------------------ */

#define TD_RPC_DEFAULT_TIMEOUT_MS 60000
enum { TD_RPC_MAX_NAME = 128, TD_RPC_MAX_NESTING = 256 };

/** Where tensors of an accelerator go; see «Tensors» below. */
typedef struct td_rpc_device_map {
    const char *
        worker; /* to which calls are made; NULL: all for which there is no other map of the device */
    const char *from; /* an accelerator of this worker, "cuda:0" */
    const char *to;   /* a device of that worker; "cpu": the host */
} td_rpc_device_map;

typedef struct td_rpc_options {
    int rank;       /* as in td_rendezvous_options */
    int world_size; /* likewise */
    bool dynamic;   /* workers come and go: there is no world size, and ranks are given out */
    const char
        *init_method; /* NULL: as td_rendezvous() has it, or td_rendezvous_store() if dynamic */
    td_store
        *store; /* instead of an init method; must stay open until shutdown. With it, `rank` and
                                `world_size` count as they are */
    int64_t timeout_ms; /* of calls; 0: TD_RPC_DEFAULT_TIMEOUT_MS */
    int threads; /* that run functions at once; 0: 16. Those that wait for another call do not count */
    const char
        *backend; /* "native": through shared memory on one host, and TCP between hosts; "tcp": TCP
                            alone. NULL: native, or what TANDEM_TRANSPORT says */
    size_t max_message; /* bytes of a call's values without its tensors, at least 1024; 0: 64 MiB */
    const td_rpc_device_map *device_maps; /* up to one that is zero; copied. NULL: none */
    void *reserved[4];
} td_rpc_options;

/**
 * Makes this process the worker `name` (letters, digits, '_', '-', '.', ':' and '/', at most TD_RPC_MAX_NAME), and
 * returns when all workers of the world have joined. Functions are registered before.
 *
 * With `dynamic` it returns at once. Workers find each other by name from then on, at the first call; a name of a worker
 * that has left, or was killed, may be used again. All workers of a store are dynamic, or none is.
 *
 * Errors: TD_ERR_STATE (there is a worker already), TD_ERR_INVALID (the name or an option), TD_ERR_MISMATCH (another
 * worker has the name or the rank; both are named), TD_ERR_PEER (a worker has ended before all have joined),
 * TD_ERR_TIMEOUT (ranks that have not joined are named), and those of td_rendezvous().
 */
TD_API td_status td_init_rpc(const char *name, const td_rpc_options *options);

typedef struct td_rpc_shutdown_options {
    bool
        now; /* not graceful: fails pending calls, and functions' waits for futures, with TD_ERR_ABORTED */
    int64_t timeout_ms; /* for the graceful shutdown; 0: as long as it takes */
    void *reserved[4];
} td_rpc_shutdown_options;

/**
 * Ends the worker. Gracefully: serves calls until all workers have called this and no worker has work left;
 * then all leave. Workers that have died or left before are not waited for; those that have died are named in the log,
 * as a warning. A dynamic worker leaves when it has no calls of its own, and serves none. Remote references that are
 * still in use are then reported in the log, by name, too.
 *
 * Errors: TD_ERR_STATE (no worker; or called by a function that serves a call), TD_ERR_TIMEOUT (names workers that
 * have not called it, or still have work), TD_ERR_PEER (the store has ended with the worker that hosted it, which is
 * named, so that the others cannot agree on the end). After the latter two, the worker has ended, too.
 */
TD_API td_status td_rpc_shutdown(const td_rpc_shutdown_options *options);

/** A worker's name and rank. */
typedef struct td_worker_info {
    char name[TD_RPC_MAX_NAME + 1];
    int rank;
    void *reserved[4];
} td_worker_info;

/** This worker, if `name` is NULL, or another one. Errors: TD_ERR_INVALID (there is none of this name), TD_ERR_STATE,
 *  and those of the store. */
TD_API td_status td_worker_find(const char *name, td_worker_info *info);

/** The name of the worker of a rank, for calls to a rank: td_rpc_sync(td_worker_name(1), …). It belongs to the library
 *  until the shutdown. NULL on failure. */
TD_API const char *td_worker_name(int rank);

/* ---- Functions ---------------------------------------------------------------------------------- */

/** A call that a function serves. */
typedef struct td_rpc_call td_rpc_call;

/** Serves a call: returns its result, or NULL with the last error set, which the caller gets. Its arguments and
 *  results belong to a scope around it. A function with a TD_SCOPE of its own returns its result by td_value_return():
 *  the end of the scope frees the values, tensors and futures that were made in it. It runs on a thread of the library,
 *  several at once. A result that is a future is answered once that is complete. */
typedef td_value *(*td_rpc_fn)(td_rpc_call *call, td_value *const *args, int count);

/**
 * Registers a function. The signature has its name and parameters:
 *
 *     "add(x: tensor, y: tensor, alpha: float = 1)"     calls may leave out alpha, and name any of them
 *     "log(level: int, message: text?)"                 message may be nil; left out, it is
 *     "sum(values...: float)"                           any number of them
 *     "ping()"   "echo(x)"                              none; one of any type
 *
 * Types: any, nil, bool, int, float (an int is taken, too), text, bytes, list, map, tensor, module, rref, and the
 * name of a registered class. A default is nil, true, false, a number or a "text". args[] has all parameters in order.
 *
 * `arg` is td_rpc_call_arg() of its calls. Errors: TD_ERR_STATE (the name is registered), TD_ERR_INVALID (the signature;
 * the error shows where). Names that begin with "td." are the library's own.
 */
TD_API td_status td_rpc_register(const char *signature, td_rpc_fn fn, void *arg);

/** Removes a function or a class. Calls that run go on. TD_ERR_INVALID if there is none. */
TD_API td_status td_rpc_unregister(const char *name);

typedef struct td_rpc_method {
    const char *signature;
    td_rpc_fn fn; /* td_rpc_call_self() is the object */
} td_rpc_method;

/**
 * A class: objects that live on a worker, and are reached by remote references.
 *
 *     static const td_rpc_method net_methods[] = {{"forward(x: tensor)", net_forward}, {0}};
 *     td_rpc_register_class(&(td_rpc_class){.signature = "Net(inputs: int = 2)", .create = net_create,
 *                                           .destroy = net_destroy, .methods = net_methods});
 *     td_rref *net = td_remote("b", "Net", TD_NO_ARGS, NULL);
 *     td_value *y = td_rref_sync(net, "forward", TD_ARGS(x), NULL);
 */
typedef struct td_rpc_class {
    const char *signature; /* the name, and the parameters of `create` */
    /** Makes an object; NULL on failure. Without it, objects cannot be made by calls. */
    void *(*create)(td_rpc_call *call, td_value *const *args, int count);
    /** Frees one; NULL: nothing to free. */
    void (*destroy)(void *object);
    const td_rpc_method *methods; /* up to one without a signature; copied */
    /** The object as a value, which can be sent; and back. Without them, objects of the class cannot be sent. */
    td_value *(*pack)(void *object);
    void *(*unpack)(td_value *packed);
    void *arg; /* td_rpc_call_arg() of its calls */
    void *reserved[4];
} td_rpc_class;

/** Registers a class; the struct is copied. Errors as td_rpc_register(). */
TD_API td_status td_rpc_register_class(const td_rpc_class *rpc_class);

/** In a function: its `arg`; the object whose method it is; the worker that calls; whether the caller has cancelled the
 *  call, or does not wait any more. */
TD_API void *td_rpc_call_arg(const td_rpc_call *call);
TD_API void *td_rpc_call_self(const td_rpc_call *call);
TD_API const char *td_rpc_call_from(const td_rpc_call *call);
TD_API bool td_rpc_call_is_cancelled(const td_rpc_call *call);

/* ---- Calls -------------------------------------------------------------------------------------- */

typedef struct td_rpc_call_options {
    td_value *kwargs;   /* named arguments, a map; NULL: none */
    int64_t timeout_ms; /* 0: that of td_init_rpc() */
    bool copy;          /* tensors by value, also on one host */
    void *reserved[4];
} td_rpc_call_options;

/** Calls a function of the worker `to` (a name; this worker's own is fine), and waits for its result. `args` is a list:
 *  TD_ARGS(…) or TD_NO_ARGS. NULL on failure. */
TD_API td_value *td_rpc_sync(const char *to, const char *function, td_value *args,
                             const td_rpc_call_options *options);

/** The same without waiting. NULL only if the call could not be started; else the future has the failure. */
TD_API td_future *td_rpc_async(const char *to, const char *function, td_value *args,
                               const td_rpc_call_options *options);

/** The same, and the result stays where it is: a reference to it, at once. `function` may be a class. If the call
 *  fails, uses of the reference do. */
TD_API td_rref *td_remote(const char *to, const char *function, td_value *args,
                          const td_rpc_call_options *options);

/* ---- Tensors ------------------------------------------------------------------------------------
 *
 * A tensor in a call or a result is the receiver's own: it may be changed, and the sender's is not. It arrives as it was
 * when the call was made, whatever the sender changes in place by a function of this library afterwards.
 *
 * On one host, it goes by reference. The receiver reads the memory of the sender, which lends it: the lease ends when
 * the receiver has released its last tensor over it, or has ended. If the sender changes the tensor in place meanwhile
 * by a function of this library, it gets memory of its own first; so does the receiver. Writes through
 * td_tensor_data() are not noticed, on either side. Memory that is not of td_alloc(), and tensors under 4 KiB, are
 * copied; td_rpc_call_options.copy copies all. Between hosts, tensors are copied.
 *
 * A tensor of an accelerator is copied, by way of the host: the call waits for what is enqueued on the thread's current
 * stream of the device. It arrives on the device of the same name, or on the one that device_maps says: the maps of the
 * worker that makes the call count, from its devices to those of the other worker for the arguments, and back for the
 * result. It is complete there, for all streams. Where the receiver has no such device, the call fails with
 * TD_ERR_INVALID. Tensors of the host, also of cpu:0, cpu:1 …, arrive on the host. */

/* ---- Futures ------------------------------------------------------------------------------------
 *
 * The result of a call that may not be there yet. Reference-counted, as values are. */

/** Adds a reference, which is the caller's in any scope; drops one. NULL is fine. */
TD_API td_future *td_future_retain(td_future *future);
TD_API void td_future_release(td_future *future);

/** Waits for the result; NULL if it failed, or (TD_ERR_TIMEOUT) is not there in time. 0: the call's own timeout. */
TD_API td_value *td_future_wait(td_future *future, int64_t timeout_ms);

/** Whether it is complete. */
TD_API bool td_future_test(const td_future *future);

/** Makes a value of a complete future, whose td_future_wait() does not wait. */
typedef td_value *(*td_future_fn)(td_future *done, void *arg);

/** A future of fn(future, arg), which is called once `future` is complete: at once, by the thread that completes it, or,
 *  for the answer of a call, by a thread of the library. fn may be given a failure. It may make calls, and wait for them. */
TD_API td_future *td_future_then(td_future *future, td_future_fn fn, void *arg);

/** A future of the list of all results; the first failure is its failure. */
TD_API td_future *td_future_all(td_future *const *futures, int count);

/** Fails it with TD_ERR_ABORTED, if it is not complete; and the function that serves the call sees
 *  td_rpc_call_is_cancelled(). */
TD_API void td_future_cancel(td_future *future);

/** A future of the program's own, and its completion, once: by a value, or by a failure. TD_ERR_STATE if it is
 *  complete. */
TD_API td_future *td_future_create(void);
TD_API td_status td_future_set(td_future *future, td_value *value);
TD_API td_status td_future_fail(td_future *future, td_status status, const char *text);

/* ---- Remote references --------------------------------------------------------------------------
 *
 * A reference to a value on its owner, a worker. The value is freed when no worker has a reference to it any more.
 * References may be passed to any worker, as arguments and results. Reference-counted, as values are. */

/** Adds a reference of the program, which is the caller's in any scope; drops one. NULL is fine. */
TD_API td_rref *td_rref_retain(td_rref *rref);
TD_API void td_rref_release(td_rref *rref);

/** A reference to a value of this worker. */
TD_API td_rref *td_rref_create(td_value *value);

/** The owner's name, which belongs to the reference; whether that is this worker; whether the owner is known to have
 *  recorded this reference. */
TD_API const char *td_rref_owner(const td_rref *rref);
TD_API bool td_rref_is_owner(const td_rref *rref);
TD_API bool td_rref_confirmed_by_owner(const td_rref *rref);

/** A copy of the value; waits for it. On the owner, the value itself. 0: the timeout of calls. */
TD_API td_value *td_rref_to_here(td_rref *rref, int64_t timeout_ms);

/** The value itself, on its owner only: TD_ERR_STATE elsewhere. Waits for it. */
TD_API td_value *td_rref_local_value(td_rref *rref);

/** Calls a method of the object (or module) that it refers to, on its owner. Modules have "forward(inputs...: tensor)",
 *  "parameters()" (a list of references), "parameter(name: text)", "state()", "load_state(state: map)",
 *  "train(training: bool = true)", and "module()"; td_remote_module_of() uses them as a module. */
TD_API td_value *td_rref_sync(td_rref *rref, const char *method, td_value *args,
                              const td_rpc_call_options *options);
TD_API td_future *td_rref_async(td_rref *rref, const char *method, td_value *args,
                                const td_rpc_call_options *options);
TD_API td_rref *td_rref_remote(td_rref *rref, const char *method, td_value *args,
                               const td_rpc_call_options *options);

/* ---- Remote modules -----------------------------------------------------------------------------
 *
 *     td_module *model = td_sequential(td_remote_module("b", "make_stage", TD_ARGS(0), NULL),
 *                                      td_remote_module("c", "make_stage", TD_ARGS(1), NULL), td_linear(64, 10), NULL);
 *     td_dist_optimizer *sgd = td_dist_sgd(td_remote_parameters(model), &(td_sgd_options){.lr = 0.1});
 *     …
 *     td_tensor *y = td_forward(model, x);                 runs on "b", on "c" and here
 *
 * A remote module is used as any other, while its parameters are on another worker. In a context of distributed autograd
 * (dist_autograd.h) its forward is recorded, unless grad mode is off; outside of one it computes without a graph.
 * td_module_train() and td_module_eval() reach the module; if its worker cannot be reached, the next forward fails.
 *
 * Its tensors are not here: td_module_parameters(), td_module_state(), td_module_clone(), td_module_to() and what uses
 * them, such as td_sgd() and td_ddp(), fail with TD_ERR_UNSUPPORTED for each model that contains one. Failures of calls name
 * the worker. In a call it is sent as a reference: the receiver gets a handle of the same module. */

/** Calls a function of the worker `to` that returns a module, and waits for it: a module here that stands for it. It
 *  belongs to the caller. The timeout and `copy` of the options are kept for its calls. NULL on failure. */
TD_API td_module *td_remote_module(const char *to, const char *function, td_value *args,
                                   const td_rpc_call_options *options);

/** The same of a module to which there is a reference, which is retained. */
TD_API td_module *td_remote_module_of(td_rref *rref, const td_rpc_call_options *options);

/** The reference to its module, which belongs to it: for methods such as "state". TD_ERR_INVALID for other modules. */
TD_API td_rref *td_remote_module_rref(const td_module *module);

/** A list of references to the parameters of a module and its children, in the order of td_module_parameters(), shared
 *  ones once: those of remote modules, and those here as references to values of this worker. For td_dist_sgd(). */
TD_API td_value *td_remote_parameters(td_module *module);

#ifdef __cplusplus
}
#endif

#endif
