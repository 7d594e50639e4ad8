// Unpack plotly.js and the figures, which the page carries as gzip in base 85.
// ALPHABET comes from the page. Until plotly.js is there, a call of it waits, and returns a promise.
const unpacked = async (id) => {
  const digits = document.getElementById(id).textContent;
  const valueOf = new Uint8Array(128);
  [...ALPHABET].forEach((digit, value) => (valueOf[digit.charCodeAt(0)] = value));
  const bytes = new DataView(new ArrayBuffer(Math.ceil(digits.length / 5) * 4));
  for (let place = 0, at = 0; place < digits.length; place += 5, at += 4) {
    let value = 0;
    for (let digit = 0; digit < 5; digit++) {
      value = value * 85 + (place + digit < digits.length ? valueOf[digits.charCodeAt(place + digit)] : 84);
    }
    bytes.setUint32(at, value);
  }
  const packed = new Blob([bytes.buffer.slice(0, Math.floor((digits.length * 4) / 5))]);
  return new Response(packed.stream().pipeThrough(new DecompressionStream("gzip"))).text();
};

const plotlyLoaded = new Promise((resolve, reject) => {
  window.Plotly = new Proxy({}, { get: (_, name) => (...given) => plotlyLoaded.then(() => window.Plotly[name](...given)) });
  addEventListener("DOMContentLoaded", () => {
    unpacked("plotly").then((source) => {
      const script = document.createElement("script");
      script.textContent = source;
      document.head.append(script);
      // For figures of plugins too: plotly.js offers by default to upload the data of a chart to a server.
      window.Plotly.setPlotConfig({ showSendToCloud: false, plotlyServerURL: "", displaylogo: false });
      resolve();
    }).catch(reject);
  });
});
