/* Plug-ins for test_plugin.c: one good one, and many that must be refused. SAMPLE_x chooses which; SAMPLE_NAME is its
 * name. */
#include <tandem/backend.h>
#include <tandem/device_ops.h>
#include <tandem/kernels.h>
#include <tandem/plugin.h>

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#if !defined(SAMPLE_NO_SYMBOL)

/* How often init() was called: the `arg` of the backend. */
static atomic_int inits;

static td_status create(const td_backend_context *context, void *arg, void **self)
{
    (void)context;
    (void)arg;
    (void)self;
    return td_fail(TD_ERR_UNSUPPORTED, "the backend of a sample creates nothing");
}

static void destroy(void *self)
{
    (void)self;
}

static const td_backend_ops ops = {.create = create, .destroy = destroy};

static td_status register_backend(void)
{
    atomic_fetch_add(&inits, 1);
    return td_register_backend(SAMPLE_NAME, &ops, &inits);
}

#if defined(SAMPLE_SLOW)
/* Says that it runs, and goes on when it may: SAMPLE_PIPES=READY,GO are descriptors. */
static td_status init(void)
{
    const char *pipes = getenv("SAMPLE_PIPES");
    if (pipes) {
        char byte = 0;
        if (write(atoi(pipes), &byte, 1) != 1 || read(atoi(strchr(pipes, ',') + 1), &byte, 1) != 1)
            return td_fail(TD_ERR_SYSTEM, "the pipes do not work");
    } else {
        usleep(20000); /* so that other threads come meanwhile */
    }
    return register_backend();
}
#elif defined(SAMPLE_NESTED)
/* Looks for itself, lists, fails to load one that is not there, loads another one, and then registers. */
static td_status init(void)
{
    td_plugin_info *list;
    int count;
    td_status status = td_load_plugin(SAMPLE_NAME);
    if (!status && !td_load_plugin("absent"))
        return td_fail(TD_ERR_STATE, "a plug-in is there that should not be");
    if (!status)
        status = td_list_plugins(false, &list, &count);
    if (!status)
        td_free_plugin_list(list);
    if (!status)
        status = td_load_plugin("good");
    return status ? status : register_backend();
}
#elif defined(SAMPLE_FORKING)
static td_status init(void)
{
    int ended = -1;
    pid_t child = fork();
    if (child == 0)
        _exit(td_load_plugin(SAMPLE_NAME) ? 1 : 42);
    if (child < 0 || waitpid(child, &ended, 0) != child || WEXITSTATUS(ended) != 42)
        return td_fail(TD_ERR_SYSTEM, "the child of init() ended with %d", ended);
    return register_backend();
}
#elif defined(SAMPLE_DEVICE) || defined(SAMPLE_OLD_DEVICE)
/* A kind of device with three devices, none of which can be opened; or one whose table is too old. */
static td_status describe(void *arg, char *text, size_t size)
{
    (void)arg;
    snprintf(text, size, "a sample");
    return TD_OK;
}

static int count(void *arg)
{
    (void)arg;
    return 3;
}

static td_status open_none(void *arg, int index, void **self)
{
    (void)arg;
    (void)self;
    return td_fail(TD_ERR_UNSUPPORTED, "sample number %d cannot be opened", index);
}

static void never_called(void)
{
    abort();
}

static td_status init(void)
{
    static td_kernels kernels = {.version = TD_KERNELS_VERSION, .size = sizeof kernels};
    static td_device_ops table;
    (void)register_backend;
    /* All functions that a table may not lack. They are members of one struct, and none of them is called. */
    for (size_t at = offsetof(td_device_ops, alloc); at < offsetof(td_device_ops, kernels);
         at += sizeof(void (*)(void)))
        memcpy((char *)&table + at, &(void (*)(void)){never_called}, sizeof(void (*)(void)));
    table.version = TD_DEVICE_OPS_VERSION;
#if defined(SAMPLE_OLD_DEVICE)
    table.version = 0;
#endif
    table.size = sizeof table;
    table.kind = SAMPLE_NAME;
    table.describe = describe;
    table.count = count;
    table.open = open_none;
    table.kernels = &kernels;
    return td_register_device(&table, NULL);
}
#elif defined(SAMPLE_FAILING)
/* Succeeds later, with SAMPLE_DRIVER set. */
static td_status init(void)
{
    return getenv("SAMPLE_DRIVER")
               ? register_backend()
               : td_fail(TD_ERR_UNSUPPORTED, "the driver is version 1; 2 is needed");
}
#elif defined(SAMPLE_SILENT)
static td_status init(void)
{
    (void)register_backend;
    return TD_ERR_PEER;
}
#elif defined(SAMPLE_UNDEFINED)
td_status td_function_that_no_version_has(void);
static td_status init(void)
{
    (void)register_backend;
    return td_function_that_no_version_has();
}
#else
static td_status init(void)
{
    return register_backend();
}
#endif

#if defined(SAMPLE_OLD) || defined(SAMPLE_NEW) || defined(SAMPLE_OTHER_ABI) || defined(SAMPLE_NEWER)
#if defined(SAMPLE_OLD)
enum { VERSION = 0, HEADERS = TD_VERSION };
#elif defined(SAMPLE_NEW)
enum { VERSION = TD_PLUGIN_VERSION + 8, HEADERS = TD_VERSION };
#elif defined(SAMPLE_OTHER_ABI)
enum { VERSION = TD_PLUGIN_VERSION, HEADERS = TD_VERSION + 10000 };
#else
enum { VERSION = TD_PLUGIN_VERSION, HEADERS = TD_VERSION + 1 };
#endif
TD_API const td_plugin *tandem_plugin(void);
const td_plugin *tandem_plugin(void)
{
    static const td_plugin description = {
        .version = VERSION, .size = sizeof description, .headers = HEADERS, SAMPLE_NAME, "1", init};
    return &description;
}
#elif defined(SAMPLE_WRONG_NAME)
TD_PLUGIN("another", "1", init)
#else
TD_PLUGIN(SAMPLE_NAME, "1.5", init)
#endif

#else
TD_API int sample_is_no_plugin(void);
int sample_is_no_plugin(void)
{
    return 0;
}
#endif
