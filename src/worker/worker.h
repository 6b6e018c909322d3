// src/worker/worker.h - the worker process, which holds the model and computes. It talks to the
// front through a channel (shm/channel.h) with the records of tandem/wire.h.
#pragma once

// The hidden command `tandem worker ...`: argv[1] is "worker"; worker/args.h has the other
// arguments and the inherited descriptors. Opens the model, sends READY (or FATAL with the reason),
// serves until SHUTDOWN or until the front has died, and returns the exit status.
int td_worker_main(int argc, char **argv);
