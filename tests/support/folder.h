// tests/support/folder.h - folders that a test makes.
#pragma once

// Removes a folder and all that is in it. What is not there is removed already.
void td_test_remove_folder(const char *path);
