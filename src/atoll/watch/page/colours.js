// The colours that tell workers and runs apart.

export const MOST_COLOURS = 8;

/** Returns the colour of a worker or a run by its place, as a class. */
export const colour = (at) => `c${at % MOST_COLOURS}`;
