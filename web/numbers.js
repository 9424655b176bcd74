// Numbers as the tab shows them.

/** Three digits that count. */
export function short(number) {
  return Number(number.toPrecision(3)).toString()
}

export function percent(part) {
  return `${Math.round(100 * part)} %`
}

/** "1.2", in decimal gigabytes as elsewhere in Monarch. */
export function gigabytes(bytes) {
  return (bytes / 1e9).toFixed(bytes < 1e11 ? 1 : 0)
}

export function rate(bytesPerSecond) {
  return bytesPerSecond < 1e9 ? `${short(bytesPerSecond / 1e6)} MB/s` : `${short(bytesPerSecond / 1e9)} GB/s`
}
