#include "app/command.h"

#include "base/log.h"

int td_cmd_fail(const td_err *err) {
  td_error("%s", err->msg);
  return err->code == TD_EINVAL ? 2 : 1;
}

td_status td_cmd_need_model(const td_options *options, td_err *err) {
  if (options->model) return TD_OK;
  return td_fail(err, TD_EINVAL, "tandem %s needs --model DIR, a checkpoint directory",
                 td_command_name(options->command));
}
