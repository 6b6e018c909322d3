// src/worker/worker.h - the worker process: it holds the model and computes. It talks to the front
// through a channel (shm/channel.h) with the records of tandem/wire.h.
#ifndef TD_WORKER_WORKER_H
#define TD_WORKER_WORKER_H

// The hidden command `tandem worker ...`: argv[1] is "worker", the rest and the inherited
// descriptors are those of worker/args.h. Opens the model, sends READY (or FATAL with the reason),
// serves until SHUTDOWN or until the front has died, and returns the exit status.
int td_worker_main(int argc, char **argv);

#endif
