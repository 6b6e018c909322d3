// tests/support/folder.h - folders that a test makes, and those of golden models.
#pragma once

// Removes a folder and all that is in it. What is not there is removed already.
void td_test_remove_folder(const char *path);

// The checkpoint of a golden model (scripts/golden_models.py) in the build folder, which the
// program's own is in. Valid until the thread's next call.
const char *td_test_golden(const char *name);
