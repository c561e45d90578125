/* Loads a plug-in, its argument, and prints why it cannot: in a program that has Tandem inside and exports nothing, or,
 * with TD_TEST_LIBRARY, in one that has loaded libtandem.so with its symbols hidden from others. */
#include <tandem/plugin.h>

#include <dlfcn.h>
#include <stdio.h>

#ifdef TD_TEST_LIBRARY
typedef td_status (*load_fn)(const char *);
typedef const char *(*text_fn)(void);

int main(int argc, char **argv)
{
    void *library = dlopen(TD_TEST_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    load_fn load;
    text_fn text;
    if (!library || argc != 2)
        return 2;
    *(void **)&load = dlsym(library, "td_load_plugin");
    *(void **)&text = dlsym(library, "td_last_error");
    if (load(argv[1]))
        puts(text());
    else
        puts("loaded");
    return 0;
}
#else
int main(int argc, char **argv)
{
    if (argc != 2)
        return 2;
    puts(td_load_plugin(argv[1]) ? td_last_error() : "loaded");
    return 0;
}
#endif
