// The overview as the page uses it: the server's flat list of runs, each with its job.

/**
 * Groups the runs of an answer of `/overview` by job.
 *
 * @returns {{time: number, problems: Array, problemCount: number, jobs: Array<Object>}} Jobs and runs have the server's fields; of a job,
 *   `job` is its id and `runs` are its runs. `time` is the reader's clock, in seconds.
 */
export function grouped(answer) {
  const runs = new Map(answer.jobs.map((job) => [job.id, []]));
  for (const run of answer.runs) runs.get(run.job)?.push(run);
  return {
    time: Date.now() / 1000,
    problems: answer.problems,
    problemCount: answer.problem_count,
    jobs: answer.jobs.map((job) => ({ ...job, job: job.id, runs: runs.get(job.id) })),
  };
}

/** What a job's state is called: that of its supervisor, unless nobody runs it; of one that is over, whether its runs are done. */
export function stateOfJob(job) {
  if (job.error) return "unreadable";
  if (job.running) return job.state || "running";
  if (job.runs?.length > 0 && job.runs.every((run) => run.state === "done")) return "done";
  if (!/running|waiting|starting/i.test(job.state)) return job.state || { job: "not running", other: "empty" }[job.kind] || job.kind;
  return "not running";
}
