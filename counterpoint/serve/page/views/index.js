// Every view, in the order of the tabs. A view is a module that exports
//   title   what its tab says,
//   path    its address, with the names of its parameters in braces: "/jobs/{job}/runs/{run}/loop",
//   key     the letter that opens it after `g`,
//   tab     only for a view without a tab of its own: the path of the view whose tab is marked instead,
//   kinds   only for a view of some kinds of jobs: their kinds, as the overview has them,
//   render(root, context) -> { update(): Promise, destroy(): void }
// `render` draws the empty view into `root`. The page calls `update` at once and then every two seconds; it gets what it needs with
// `context.get(path, query)`, which returns the same object while nothing has changed, and shows it. What `update` throws is
// shown above the view. `destroy` ends what the view has begun. `context` is described at `#context` in app.js.
import * as cluster from "./cluster.js";
import * as fleet from "./fleet.js";
import * as groups from "./groups.js";
import * as job from "./job.js";
import * as logs from "./logs.js";
import * as loop from "./loop.js";
import * as overview from "./overview.js";
import * as population from "./population.js";
import * as profile from "./profile.js";
import * as rollout from "./rollout.js";
import * as rollouts from "./rollouts.js";
import * as run from "./run.js";
import * as step from "./step.js";
import * as sweep from "./sweep.js";
import * as tenants from "./tenants.js";

export const views = [overview, job, fleet, tenants, population, sweep, cluster, logs, run, step, groups, rollouts, rollout, loop, profile];
