// The tree behind a flame graph: where each frame begins, and what functions took in all. Nothing here draws.

/** The frames, of which a caller is before what it called, with the depth, the beginning and the children of each. */
export function treeOf(frames) {
  const [depth, begin, children, end] = [[], [], [], []];
  for (const [index, frame] of frames.entries()) {
    const isFirst = frame.parent < 0;
    depth[index] = isFirst ? 0 : depth[frame.parent] + 1;
    begin[index] = isFirst ? 0 : end[frame.parent];
    end[index] = begin[index];
    children[index] = [];
    if (isFirst) continue;
    end[frame.parent] += frame.seconds;
    children[frame.parent].push(index);
  }
  return { frames, depth, begin, children, total: frames[0]?.seconds || 1 };
}

/** The time of each function at each line over the whole tree. Of calls within calls of the same, the outermost counts. */
export function placesOf({ frames }) {
  const places = new Map();
  const keys = frames.map((frame) => JSON.stringify([frame.function, frame.file, frame.line]));
  for (const [index, frame] of frames.entries()) {
    if (frame.parent < 0 || frame.other) continue;
    const key = keys[index];
    const place = places.get(key) ?? { key, function: frame.function, file: frame.file, line: frame.line, seconds: 0, own: 0 };
    let caller = frame.parent;
    while (caller > 0 && keys[caller] !== key) caller = frames[caller].parent;
    if (caller <= 0) place.seconds += frame.seconds;
    place.own += frame.own;
    places.set(key, place);
  }
  return [...places.values()];
}
