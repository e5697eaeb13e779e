// The colours and dashes of curves. Okabe and Ito's colours can be told apart with any colour vision; beyond eight curves the
// dashes change, so that no two of the first 32 look alike.
import { colour, translucent } from "../shell/theme.js";

const COLOURS = 8;
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];

/**
 * The look of curve number `index`: functions of its colours, which follow the theme, its dash, and its number in the CSS. Curves with
 * the same `index` and another `variant` differ in their dash.
 */
export function styleOf(index, variant = 0) {
  const number = (index % COLOURS) + 1;
  const variable = `--series-${number}`;
  return {
    key: `${index}/${variant}`,
    colour: String(number),
    dash: DASHES[(Math.floor(index / COLOURS) + variant) % DASHES.length],
    stroke: () => colour(variable),
    band: () => translucent(variable, 0.16),
    faint: () => translucent(variable, 0.32),
  };
}
