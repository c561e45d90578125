/* A small user of the installed library: prints its version, passes a value through a store, and loads the plug-in that
 * is its argument. */
#include <tandem/tandem.h>

#include <stdio.h>
#include <string.h>

static int fail(const char *what)
{
    fprintf(stderr, "consumer: %s: %s\n", what, td_last_error());
    return 1;
}

/* Uses the backend of the plug-in, which loads it. */
static int use_plugin(const char *name)
{
    td_store *store;
    if (td_hash_store_open(&store))
        return fail("td_hash_store_open");
    td_init_options options = {.backend = name, .store = store, .world_size = 1};
    if (td_init_process_group(&options) != TD_ERR_UNSUPPORTED)
        return fail(name);
    printf("consumer: plug-in %s: %s\n", name, td_last_error());
    return td_store_close(store) ? fail("td_store_close") : 0;
}

int main(int argc, char **argv)
{
    td_store *store;
    td_bytes value = {0};

    if (TD_CHECK_VERSION())
        return fail("TD_CHECK_VERSION");
    printf("consumer: tandem %s\n", td_version());
    if (td_hash_store_open(&store))
        return fail("td_hash_store_open");
    if (td_store_set(store, "greeting", "hello", 5))
        return fail("td_store_set");
    if (td_store_get(store, "greeting", 1000, &value))
        return fail("td_store_get");
    if (value.size != 5 || memcmp(value.data, "hello", 5) != 0) {
        fprintf(stderr, "consumer: got \"%s\" instead of \"hello\"\n", value.data);
        return 1;
    }
    td_bytes_free(&value);
    if (td_store_close(store))
        return fail("td_store_close");
    return argc > 1 ? use_plugin(argv[1]) : 0;
}
