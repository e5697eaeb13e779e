// Words of ours that a reader may not know, each in a sentence. They are the titles of what they stand on, and the page's help lists them.
export const WORDS = {
  staleness: "Updates between the weights that wrote a token and its training: 1 is fully on-policy",
  shipped: "Sent to the trainer as the batch of a step",
  filtered: "Left out by a filter, such as a group whose rewards are all equal: it would teach nothing",
  dropped: "Not trained at all, such as a group that became too old; another one is started in its place",
  merge: "To make samples to train on of a rollout's turns",
  finalize: "To check a group's rollouts, compute their advantages and apply the filters, once all of them have ended",
  records: "To write the rollouts of a step to the disk, as they are shown here",
  commit: "To save the run's state after a step: from then on the step is trained exactly once",
  durable: "Saved by the trainer: no kill loses these steps",
  evict: "To end a run for good: the trainer takes no more of it",
  fleet: "The inference servers and the trainer, which the runs of a job share",
  proven: "The server was shown to compute with the published weights, before it gets requests",
};
