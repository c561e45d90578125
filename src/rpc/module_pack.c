#include "base/fail.h"
#include "rpc/codec.h"
td_value *td__module_pack(td_module *module)
{
    (void)module;
    td_fail(TD_ERR_UNSUPPORTED, "module");
    return NULL;
}
td_module *td__module_unpack(const td_value *packed)
{
    (void)packed;
    td_fail(TD_ERR_UNSUPPORTED, "module");
    return NULL;
}
