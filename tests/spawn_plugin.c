/* A shared object with a function for td_spawn(), built twice with different code. */
#include <tandem/launch.h>

#include <string.h>

td_status plugin_work(int rank, void *arg);

td_status plugin_work(int rank, void *arg)
{
    const char *text = arg;
    char expected[] = {'b', 'u', 'i', 'l', 'd', ' ', '0' + BUILD, '\0'};
#if BUILD == 2
    if (rank > 1000)
        return TD_ERR_MISMATCH;
#endif
    return rank >= 0 && text && !strcmp(text, expected) ? TD_OK : TD_ERR_UNSUPPORTED;
}
