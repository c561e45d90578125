/* A plug-in of another project: a backend that serves no group. */
#include <tandem/backend.h>
#include <tandem/plugin.h>

static td_status create(const td_backend_context *context, void *arg, void **self)
{
    (void)context;
    (void)arg;
    (void)self;
    return td_fail(TD_ERR_UNSUPPORTED, "the backend \"consumer\" is an example");
}

static void destroy(void *self)
{
    (void)self;
}

static const td_backend_ops ops = {.create = create, .destroy = destroy};

static td_status init(void)
{
    return td_register_backend("consumer", &ops, NULL);
}

TD_PLUGIN("consumer", "0.3", init)
