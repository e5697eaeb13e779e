// The zoom and the cursor that the charts of a view share. It outlives their data: a chart that gets new points keeps its zoom.

let groups = 0;

/** The charts of a view. */
export class ZoomGroup {
  /** @param {function(Array<number>|null): void} [onChange] - Told the new range, null for everything. */
  constructor(onChange = () => {}) {
    groups += 1;
    this.key = `zoom-group-${groups}`;
    this.range = null;
    this.cursor = null;
    this.extent = null;
    this.marks = [];
    this.members = new Set();
    this.onChange = onChange;
  }

  /** Adds a chart: an object with `zoomTo(range)` and `moveTo(x)`. */
  add(member) {
    this.members.add(member);
  }

  /** Removes a chart. */
  remove(member) {
    this.members.delete(member);
  }

  /** Sets the least and the greatest x that there is, of which the charts may have a part only. */
  setExtent(extent) {
    this.extent = extent;
  }

  /** Sets the moments that all charts mark, as `{x, text}`. */
  setMarks(marks) {
    this.marks = marks;
  }

  /** Zooms all charts to a range of x. */
  zoom(range) {
    this.range = range;
    for (const member of this.members) member.zoomTo(range);
    this.onChange(range);
  }

  /** Shows everything again. */
  reset() {
    this.cursor = null;
    this.zoom(null);
  }

  /** Moves the shared cursor to an x. */
  move(x) {
    this.cursor = x;
    for (const member of this.members) member.moveTo(x);
  }

  /** What a key does on a chart that has the points `x`. */
  onKey(event, x, onPick) {
    if (x.length === 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    const [first, last] = this.extent ?? [x[0], x[x.length - 1]];
    const [least, greatest] = this.range ?? [first, last];
    const at = this.cursor !== null && this.cursor >= least && this.cursor <= greatest ? this.cursor : (least + greatest) / 2;
    const move = (way) => (event.shiftKey ? this.#pan(way, [least, greatest], [first, last]) : this.move(neighbour(x, this.cursor, way, least, greatest)));
    const widen = (factor) => this.#widen([at - (at - least) * factor, at + (greatest - at) * factor], [first, last]);
    const actions = {
      ArrowLeft: () => move(-1),
      ArrowRight: () => move(1),
      "+": () => widen(0.5),
      "=": () => widen(0.5),
      "-": () => widen(2),
      0: () => this.reset(),
      Home: () => this.reset(),
      Enter: () => onPick && this.cursor !== null && onPick(this.cursor),
    };
    if (!(event.key in actions)) return;
    event.preventDefault();
    event.stopPropagation();
    actions[event.key]();
  }

  #pan(way, [least, greatest], [first, last]) {
    const wanted = (way * (greatest - least)) / 4;
    const shift = Math.max(first - least, Math.min(last - greatest, wanted));
    if (this.range && shift !== 0) this.zoom([least + shift, greatest + shift]);
  }

  #widen([least, greatest], [first, last]) {
    if (least <= first && greatest >= last) this.reset();
    else this.zoom([Math.max(least, first), Math.min(greatest, last)]);
  }
}

/** The next point to one side of the cursor within the range; from nowhere, the newest. */
function neighbour(x, cursor, way, least, greatest) {
  const inside = x.filter((value) => value >= least && value <= greatest);
  if (inside.length === 0) return cursor;
  if (cursor === null) return inside[inside.length - 1];
  const beyond = way > 0 ? inside.find((value) => value > cursor) : inside.findLast((value) => value < cursor);
  return beyond ?? cursor;
}
