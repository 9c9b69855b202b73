// Small volumes out of sheets of slices: grey values from a JPEG, labels and predictions from a PNG, to the byte.

function bytesOf(base64) {
  return Uint8Array.from(atob(base64), (sign) => sign.charCodeAt(0));
}

async function readVolumes(preview) {
  const [x, y, z] = preview.shape;
  const grey = await greySheet(preview.image);
  const images = Array.from({ length: preview.channels }, (_, channel) => fromSheet(grey, preview, channel));
  if (!preview.codes) return { x, y, z, images, label: null, predicted: null };
  const codes = await codeSheet(bytesOf(preview.codes));
  return { x, y, z, images, label: fromSheet(codes, preview, 0), predicted: fromSheet(codes, preview, 1) };
}

async function greySheet(base64) {
  const picture = new Image();
  picture.src = `data:image/jpeg;base64,${base64}`;
  await picture.decode();
  const canvas = element("canvas", { width: picture.naturalWidth, height: picture.naturalHeight });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(picture, 0, 0);
  const { data, width } = context.getImageData(0, 0, canvas.width, canvas.height);
  const values = new Uint8Array(data.length / 4);
  for (let at = 0; at < values.length; at += 1) values[at] = data[4 * at];
  return { values, width };
}

// A PNG of grey bytes. Browsers that blur what scripts read of a canvas would change classes, so it is unpacked here.
async function codeSheet(bytes) {
  const view = new DataView(bytes.buffer);
  const parts = [];
  let [width, height] = [0, 0];
  for (let at = 8; at < bytes.length; ) {
    const length = view.getUint32(at);
    const name = String.fromCharCode(...bytes.subarray(at + 4, at + 8));
    if (name === "IHDR") [width, height] = [view.getUint32(at + 8), view.getUint32(at + 12)];
    if (name === "IDAT") parts.push(bytes.subarray(at + 8, at + 8 + length));
    at += length + 12;
  }
  const unpacked = new Blob(parts).stream().pipeThrough(new DecompressionStream("deflate"));
  const raw = new Uint8Array(await new Response(unpacked).arrayBuffer());
  return { values: unfiltered(raw, width, height), width };
}

function unfiltered(raw, width, height) {
  const out = new Uint8Array(width * height);
  for (let row = 0; row < height; row += 1) {
    const filter = raw[row * (width + 1)];
    for (let column = 0; column < width; column += 1) {
      const at = row * width + column;
      const left = column ? out[at - 1] : 0;
      const up = row ? out[at - width] : 0;
      const corner = row && column ? out[at - width - 1] : 0;
      const guess = [0, left, up, (left + up) >> 1, paeth(left, up, corner)][filter];
      out[at] = raw[row * (width + 1) + 1 + column] + guess;
    }
  }
  return out;
}

function paeth(left, up, corner) {
  const guess = left + up - corner;
  const [a, b, c] = [Math.abs(guess - left), Math.abs(guess - up), Math.abs(guess - corner)];
  return a <= b && a <= c ? left : b <= c ? up : corner;
}

function fromSheet(sheet, preview, number) {
  const [x, y, z] = preview.shape;
  const rows = Math.ceil(z / preview.columns);
  const volume = new Uint8Array(x * y * z);
  for (let slice = 0; slice < z; slice += 1) {
    const top = (number * rows + Math.floor(slice / preview.columns)) * y;
    const left = (slice % preview.columns) * x;
    for (let row = 0; row < y; row += 1) {
      const from = (top + row) * sheet.width + left;
      volume.set(sheet.values.subarray(from, from + x), (slice * y + row) * x);
    }
  }
  return volume;
}

// The three ways through a volume: how large a slice is, and where its pixels lie. Up is the second axis' upper end.
const PLANES = {
  axial: { across: 0, up: 1, through: 2 },
  coronal: { across: 0, up: 2, through: 1 },
  sagittal: { across: 1, up: 2, through: 0 },
};

// Of a volume whose axes lead elsewhere, as with data.orientation null, a plane has the name of what it is.
function planeName(plane, axes) {
  const names = { R: "sagittal", L: "sagittal", A: "coronal", P: "coronal", S: "axial", I: "axial" };
  return (axes && names[axes[PLANES[plane].through]]) || plane;
}

// The letters of where a picture's right and top lie: R or L, A or P, S or I. A flat image has no patient around it.
function sidesOf(plane, { axes, shape }) {
  return axes && shape[2] > 1 ? `→ ${axes[PLANES[plane].across]} ↑ ${axes[PLANES[plane].up]}` : "";
}

function sliceOf(volumes, volume, plane, at) {
  const { across, up, through } = PLANES[plane];
  const size = [volumes.x, volumes.y, volumes.z];
  const strides = [1, volumes.x, volumes.x * volumes.y];
  const [width, height] = [size[across], size[up]];
  const out = new Uint8Array(width * height);
  for (let row = 0; row < height; row += 1) {
    let from = at * strides[through] + (height - 1 - row) * strides[up];
    for (let column = 0; column < width; column += 1, from += strides[across]) out[row * width + column] = volume[from];
  }
  return { values: out, width, height };
}
