// One job: the overview's list of this job alone, its servers, and the way for another run to join it.
import { fill } from "../shell/api.js";
import { element, setAttribute } from "../shell/dom.js";
import { visible } from "../shell/format.js";
import { field, openDialog, toast } from "../widgets/dialog.js";
import { renderJobs } from "./overview.js";
import { processList, usageCharts } from "./processes.js";
import { serverList } from "./server_list.js";

export const title = "Runs";
export const path = "/jobs/{job}";
export const key = "j";
export const kinds = ["job", "other", "missing"];

const EXAMPLE = 'run_id = "another"\nsteps = 100\n\n[[environments]]\nname = "reverse"\nkind = "reverse-text"\n';

/** Draws the view. */
export function render(root, context) {
  const { job } = context.parameters;
  const join = element("button", { type: "button", class: "button small", on: { click: () => joinRun(context) } }, "Join a run…");
  const list = renderJobs(root, context, visible(job, 64), (one) => one.job === job);
  const servers = serverList(context);
  const processes = processList(context);
  const usage = usageCharts(context);
  root.firstChild.append(element("span", { class: "spacer" }), join);
  root.append(processes.element, servers.element, usage.element);
  return {
    async update() {
      await list.update();
      const overview = context.overview();
      const found = overview?.jobs.find((one) => one.job === job);
      setAttribute(join, "hidden", !found?.running);
      setAttribute(join, "disabled", !context.mayChange());
      processes.update(found, overview?.time, found?.kind === "job" && found.runs.every((run) => run.step === 0));
      if (!found) return;
      await servers.update(found.running);
      await usage.update();
    },
    destroy() {
      list.destroy();
      usage.destroy();
    },
  };
}

function joinRun(context) {
  return openDialog({
    title: "Join a run",
    confirm: "Start the run",
    wide: true,
    body: ["Starts an orchestrator in this job, on the machine of the server. Model, trainer and servers are the job's; the file holds what is the run's own.", field({ name: "text", label: "The run's file (TOML)", type: "textarea", rows: 12, value: EXAMPLE, spellcheck: "false", required: true, class: "mono" }), element("label", { class: "choice" }, element("input", { type: "checkbox", name: "resume" }), "Continue from the run's newest checkpoint")],
    act: async ({ text, resume }) => {
      const answer = await context.change(fill("/jobs/{job}/runs", context.parameters), { text, resume: resume === "on" }, 100);
      toast(`${visible(answer.run_id, 64)} has begun. Its output is in ${visible(answer.log, 200)}.`);
      return answer;
    },
  });
}
