/* A program that is not linked with Tandem, and loads it as an interpreter or a host of plug-ins does.
 *
 *     dlopen_host LIBRARY calls       some calls, among them a world of one process, and a fork
 *     dlopen_host LIBRARY again       opened and closed many times, with a thread of its own in between
 *     dlopen_host LIBRARY threads     opened while other threads exist, which then use it, each its errors */
#include <tandem/base.h>
#include <tandem/group.h>
#include <tandem/store.h>

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { THREADS = 64, TIMES = 20 };

#define MUST(condition)                                                                            \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "line %d: %s does not hold\n", __LINE__, #condition);                  \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

/* A pointer to the function of the library with this name. */
#define FIND(name) __typeof__(name) *name##_ = (__typeof__(name) *)find(library, #name)

static void *find(void *library, const char *name)
{
    void *function = dlsym(library, name);
    MUST(function);
    return function;
}

static void *load(const char *path)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
    return library;
}

static void use_store(void *library)
{
    FIND(td_hash_store_open);
    FIND(td_tcp_store_open);
    FIND(td_store_set);
    FIND(td_store_get);
    FIND(td_store_close);
    FIND(td_bytes_free);
    td_tcp_store_options options = {.host_server = true, .secret = "of this test"};
    for (int tcp = 0; tcp < 2; tcp++) {
        td_store *store;
        td_bytes value;
        MUST(!(tcp ? td_tcp_store_open_("127.0.0.1", 0, &options, &store)
                   : td_hash_store_open_(&store)));
        MUST(!td_store_set_(store, "key", "value", 5));
        MUST(!td_store_get_(store, "key", 0, &value));
        MUST(value.size == 5 && !memcmp(value.data, "value", 5));
        td_bytes_free_(&value);
        MUST(!td_store_close_(store));
    }
}

static void use_world(void *library)
{
    FIND(td_init_process_group);
    FIND(td_destroy_process_group);
    FIND(td_group_all_reduce);
    FIND(td_alloc);
    FIND(td_free);
    MUST(!td_init_process_group_(NULL));
    float *numbers = td_alloc_(4 * sizeof *numbers);
    MUST(numbers);
    for (int i = 0; i < 4; i++)
        numbers[i] = (float)i;
    MUST(!td_group_all_reduce_(numbers, numbers, 4, TD_F32, TD_SUM, NULL, NULL));
    MUST(numbers[3] == 3);
    td_free_(numbers);
    MUST(!td_destroy_process_group_());
}

/* The library's fork handlers run, also after its last dlclose(). */
static void fork_once(void)
{
    int status;
    pid_t pid = fork();
    if (pid == 0)
        _exit(0);
    MUST(pid > 0 && waitpid(pid, &status, 0) == pid && status == 0);
}

static void calls(const char *path)
{
    void *library = load(path);
    FIND(td_version);
    MUST(td_version_()[0]);
    use_store(library);
    use_world(library);
    fork_once();
    MUST(!dlclose(library));
    fork_once();
}

/* A failure of this thread: the sentence has its number, and no other thread's. */
static void *fail_alone(void *library)
{
    FIND(td_tcp_store_open);
    FIND(td_last_error);
    FIND(td_last_status);
    for (int i = 0; i < 100; i++) {
        char host[64];
        td_store *store;
        int port = -1 - (int)((uintptr_t)pthread_self() % 100000) * 100 - i;
        snprintf(host, sizeof host, "port %d is", port);
        MUST(td_tcp_store_open_("127.0.0.1", port, NULL, &store) == TD_ERR_INVALID);
        MUST(strstr(td_last_error_(), host));
        MUST(td_last_status_() == TD_ERR_INVALID);
    }
    return NULL;
}

static void again(const char *path)
{
    for (int i = 0; i < TIMES; i++) {
        pthread_t thread;
        void *library = load(path);
        use_store(library);
        MUST(!pthread_create(&thread, NULL, fail_alone, library));
        if (i % 2)
            MUST(!pthread_join(thread, NULL));
        MUST(!dlclose(library));
        if (i % 2 == 0)
            MUST(!pthread_join(thread, NULL));
    }
}

static pthread_barrier_t loaded;
static void *late_library;

static void *wait_and_use(void *arg)
{
    pthread_barrier_wait(&loaded);
    fail_alone(late_library);
    return arg;
}

static void threads(const char *path)
{
    pthread_t others[THREADS];
    MUST(!pthread_barrier_init(&loaded, NULL, THREADS + 1));
    for (int i = 0; i < THREADS; i++)
        MUST(!pthread_create(&others[i], NULL, wait_and_use, NULL));
    late_library = load(path);
    pthread_barrier_wait(&loaded);
    fail_alone(late_library);
    for (int i = 0; i < THREADS; i++)
        MUST(!pthread_join(others[i], NULL));
    MUST(!dlclose(late_library));
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*run)(const char *path);
    } cases[] = {{"calls", calls}, {"again", again}, {"threads", threads}};
    for (size_t i = 0; argc == 3 && i < sizeof cases / sizeof *cases; i++) {
        if (!strcmp(argv[2], cases[i].name)) {
            cases[i].run(argv[1]);
            return 0;
        }
    }
    fprintf(stderr, "usage: dlopen_host LIBRARY calls|again|threads\n");
    return 2;
}
